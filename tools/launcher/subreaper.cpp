#include "tessera/tools/launcher/subreaper.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

namespace tessera {
namespace {

constexpr std::chrono::seconds kPatience{2};

}  // namespace

template <typename Visit>
void Subreaper::for_each_child(const Visit& visit) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename().string();
    if (!std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c) != 0; })) continue;
    std::ifstream file(entry.path() / "stat");
    std::string line;
    if (!std::getline(file, line)) continue;
    // The command's name stands in parentheses and may itself contain some, so the fields start after the last ')'.
    std::istringstream fields(line.substr(line.rfind(')') + 1));
    char state = '?';
    pid_t parent = 0;
    Child child = {.process = {static_cast<pid_t>(std::stol(name)), {}}, .group = 0};
    fields >> state >> parent >> child.group;
    if (parent != ::getpid()) continue;
    for (int i = 6; i <= 22; ++i) fields >> child.process.second;
    visit(child);
  }
}

Subreaper::Subreaper() {
  ::prctl(PR_GET_CHILD_SUBREAPER, &was_subreaper_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  for_each_child([&](const Child& child) { before_.insert(child.process); });
}

Subreaper::~Subreaper() { ::prctl(PR_SET_CHILD_SUBREAPER, was_subreaper_); }

bool Subreaper::is_left_behind(const Child& child) const {
  return child.group != ::getpgrp() && !before_.contains(child.process);
}

void Subreaper::reap(const std::function<bool(pid_t)>& is_own) const {
  siginfo_t ended = {};
  if (::waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid == 0) return;
  for_each_child([&](const Child& child) {
    if (is_left_behind(child) && !is_own(child.process.first)) ::waitpid(child.process.first, nullptr, WNOHANG);
  });
}

void Subreaper::end_all() const {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  bool any = true;
  while (any && std::chrono::steady_clock::now() < until) {
    any = false;
    for_each_child([&](const Child& child) {
      if (!is_left_behind(child)) return;
      any = true;
      ::kill(child.process.first, SIGKILL);
      ::waitpid(child.process.first, nullptr, WNOHANG);
    });
    if (any) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace tessera

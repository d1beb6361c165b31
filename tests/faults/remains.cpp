#include "tessera/tests/faults/remains.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::faults {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSharedMemory = "/dev/shm";

std::vector<int> children() {
  std::vector<int> pids;
  std::error_code ignored;
  for (const auto& thread : fs::directory_iterator("/proc/self/task", ignored)) {
    std::ifstream file(thread.path() / "children");
    for (int pid; file >> pid;) pids.push_back(pid);
  }
  std::ranges::sort(pids);
  return pids;
}

std::string name_of(int pid) {
  std::ifstream file(fmt::format("/proc/{}/comm", pid));
  std::string name;
  std::getline(file, name);
  return name;
}

template <typename Value>
std::vector<Value> without(const std::vector<Value>& all, const std::vector<Value>& known) {
  std::vector<Value> rest;
  std::ranges::set_difference(all, known, std::back_inserter(rest));
  return rest;
}

}  // namespace

std::string use_own_shared_memory() {
  if (::unshare(CLONE_NEWNS) != 0) return std::strerror(errno);
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return std::strerror(errno);
  if (::mount("tmpfs", kSharedMemory, "tmpfs", MS_NOSUID | MS_NODEV, "size=512m") != 0) return std::strerror(errno);
  return "";
}

Before::Before(std::vector<std::string> folders) : folders_(std::move(folders)) {
  folders_.emplace_back(kSharedMemory);
  files_ = files();
  children_ = children();
}

std::vector<std::string> Before::files() const {
  std::vector<std::string> paths;
  for (const std::string& folder : folders_) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) paths.push_back(entry.path());
  }
  std::ranges::sort(paths);
  return paths;
}

std::vector<std::string> Before::left() const {
  std::vector<int> processes;
  for (int tries = 0; tries < 50; ++tries) {
    processes = without(children(), children_);
    for (const int pid : processes) ::waitpid(pid, nullptr, WNOHANG);
    if (processes.empty()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::vector<std::string> texts;
  for (const int pid : processes) texts.push_back(fmt::format("process {} ({})", pid, name_of(pid)));
  for (const std::string& path : without(files(), files_)) texts.push_back(path);
  return texts;
}

}  // namespace tessera::faults

#include "tessera/tests/hosts/host_process.h"

#include <sys/wait.h>

#include <stdexcept>

namespace tessera::testing {

std::vector<HostLine> HostOutcome::starting_with(const std::string& start) const {
  std::vector<HostLine> found;
  for (const HostLine& line : lines) {
    if (line.text.starts_with(start)) found.push_back(line);
  }
  return found;
}

std::string HostOutcome::text() const {
  std::string text;
  for (const HostLine& line : lines) text += line.text + "\n";
  return text;
}

HostProcess::HostProcess(const std::string& command) : state_(std::make_unique<State>()) {
  state_->pipe = ::popen(("exec 2>&1 </dev/null; " + command).c_str(), "re");
  if (state_->pipe == nullptr) throw std::runtime_error("cannot start a shell");
  state_->reader = std::thread([state = state_.get()] { read(*state); });
}

HostProcess::~HostProcess() {
  if (state_) wait();
}

void HostProcess::read(State& state) {
  char* line = nullptr;
  std::size_t capacity = 0;
  ssize_t length = 0;
  while ((length = ::getline(&line, &capacity, state.pipe)) > 0) {
    if (line[length - 1] == '\n') --length;
    const std::lock_guard lock(state.mutex);
    state.outcome.lines.push_back({Clock::now(), std::string(line, static_cast<std::size_t>(length))});
  }
  std::free(line);
  const int status = ::pclose(state.pipe);
  const std::lock_guard lock(state.mutex);
  state.outcome.ended = Clock::now();
  state.outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool HostProcess::says(const std::string& start, std::chrono::milliseconds limit) const {
  const auto deadline = Clock::now() + limit;
  while (true) {
    {
      const std::lock_guard lock(state_->mutex);
      if (!state_->outcome.starting_with(start).empty()) return true;
    }
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

HostOutcome HostProcess::wait() {
  if (state_->reader.joinable()) state_->reader.join();
  return state_->outcome;
}

std::string quoted(const std::string& text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

}  // namespace tessera::testing

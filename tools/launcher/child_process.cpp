#include "tessera/tools/launcher/child_process.h"

#include <signal.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace tessera {
namespace {

std::vector<char*> c_strings(const std::vector<std::string>& lines) {
  std::vector<char*> pointers;
  pointers.reserve(lines.size() + 1);
  for (const std::string& line : lines) pointers.push_back(const_cast<char*>(line.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// An exception ends the child: passed on, it would let the child run on as a second copy of the parent.
int result_of(const std::function<int()>& body) noexcept { return body(); }

}  // namespace

Program::Program(std::vector<std::string> command) : command_(std::move(command)), arguments_(c_strings(command_)) {}

Program::Program(std::vector<std::string> command, std::vector<std::string> environment)
    : command_(std::move(command)),
      environment_(std::move(environment)),
      arguments_(c_strings(command_)),
      variables_(c_strings(environment_)) {}

// Calls only functions that are safe in a signal handler, since the parent may have other threads.
void Program::exec() const {
  if (!variables_.empty()) environ = const_cast<char**>(variables_.data());
  ::execvp(arguments_[0], arguments_.data());
  const char* const reason = ::strerrordesc_np(errno);
  for (const char* part : {"cannot start ", static_cast<const char*>(arguments_[0]), ": ", reason, "\n"}) {
    if (::write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  ::_exit(127);
}

pid_t start_child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid < 0) {
    throw std::runtime_error(
        fmt::format("a process cannot be started: {}; end others of this user, raise their limit (ulimit -u), or start "
                    "fewer ranks",
                    std::strerror(errno)));
  }
  if (pid == 0) ::_exit(result_of(body));
  return pid;
}

void use_default_signals() {
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int signal = 1; signal < 32; ++signal) ::signal(signal, SIG_DFL);
}

int wait_for(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace tessera

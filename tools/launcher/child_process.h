#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera {

// Holds a program's arguments and environment in the form that exec needs. Make it before start_child(), since the
// child of a process with several threads must not allocate memory.
class Program {
 public:
  // `command[0]` is searched in PATH. Without an environment the program gets the child's.
  explicit Program(std::vector<std::string> command);
  Program(std::vector<std::string> command, std::vector<std::string> environment);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Replaces the child by the program. If that fails, writes the reason to standard error and exits with code 127.
  [[noreturn]] void exec() const;

 private:
  const std::vector<std::string> command_;
  const std::vector<std::string> environment_;
  std::vector<char*> arguments_;
  std::vector<char*> variables_;  // empty: the child's environment
};

// Starts a child process, which runs `body` and exits with what it returns, or aborts if it throws. Returns its pid.
// Throws std::runtime_error when no process can be made.
pid_t start_child(const std::function<int()>& body);

// Resets a child's signals: none is blocked, and none has a handler.
void use_default_signals();

// Waits until the child has ended. Returns its exit code, or 1000 plus the signal that ended it.
int wait_for(pid_t child);

}  // namespace tessera

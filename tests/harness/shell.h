#pragma once

#include <string>

namespace tessera::testing {

struct ShellOutcome {
  int exit_code = 0;   // 128 + the signal of a shell that was killed
  std::string output;  // both streams
};

// Runs `command` in a shell and waits for it. Throws std::runtime_error when there can be no shell.
ShellOutcome shell(const std::string& command);

}  // namespace tessera::testing

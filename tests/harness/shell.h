#pragma once

#include <string>

namespace tessera::testing {

struct ShellOutcome {
  int exit_code = 0;   // 128 + the signal if the shell was killed
  std::string output;  // both streams
};

// Runs `command` in a shell and waits for it. Throws std::runtime_error when no shell can be started.
ShellOutcome shell(const std::string& command);

}  // namespace tessera::testing

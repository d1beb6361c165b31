#include "tessera/tests/harness/shell.h"

#include <stdio.h>
#include <sys/wait.h>

#include <array>
#include <stdexcept>

namespace tessera::testing {

ShellOutcome shell(const std::string& command) {
  std::FILE* const pipe = ::popen(("{ " + command + "\n} 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot start a shell");
  ShellOutcome outcome;
  std::array<char, 4096> buffer{};
  while (const std::size_t read = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    outcome.output.append(buffer.data(), read);
  }
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

}  // namespace tessera::testing

#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera {

// A child process and the reading ends of its output, non-blocking.
struct Child {
  pid_t pid = 0;
  int out = -1;
  int err = -1;
};

// Starts a process that does nothing but lead a process group, and kills the whole group when the calling process dies.
// Returns its pid, which is the group's. Throws std::runtime_error when no process can be made.
pid_t spawn_watchdog();

// Starts `command` in process group `group` with exactly `environment`; it is killed when the calling thread ends. A program
// that cannot be started exits with code 127 and says why on standard error.
// Throws std::runtime_error when no process or pipe can be made.
Child spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment, pid_t group);

}  // namespace tessera

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

// A pipe whose ends no program inherits; both are closed when it dies, but for a reading end that was taken.
class OutputPipe {
 public:
  // Throws std::runtime_error when there can be none.
  OutputPipe();
  ~OutputPipe();
  OutputPipe(const OutputPipe&) = delete;
  OutputPipe& operator=(const OutputPipe&) = delete;

  int write_end() const { return write_end_; }
  // The reading end, non-blocking, which the caller closes from now on.
  int take_read_end();

 private:
  int read_end_ = -1;
  int write_end_ = -1;
};

// Starts a process that does nothing but lead a process group, and kills the whole group when the calling process dies.
// Returns its pid, which is the group's. Throws std::runtime_error when no process can be made.
pid_t spawn_watchdog();

// Starts `command` in process group `group` with exactly `environment`; it is killed when the calling thread ends. A
// program that cannot be started exits with code 127 and says why on standard error.
// Throws std::runtime_error when no process or pipe can be made.
Child spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment, pid_t group);

}  // namespace tessera

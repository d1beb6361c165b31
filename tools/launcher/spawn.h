#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// Holds a child process and the non-blocking reading ends of its output pipes.
struct Child {
  pid_t pid = 0;
  int out = -1;
  int err = -1;
};

// Owns a pipe whose ends no program inherits. The destructor closes both ends, except a reading end that was taken.
class OutputPipe {
 public:
  // Throws std::runtime_error when no pipe can be made.
  OutputPipe();
  ~OutputPipe();
  OutputPipe(const OutputPipe&) = delete;
  OutputPipe& operator=(const OutputPipe&) = delete;

  int write_end() const { return write_end_; }
  // Returns the non-blocking reading end, which the caller must close.
  int take_read_end();

 private:
  int read_end_ = -1;
  int write_end_ = -1;
};

// Asks the kernel to send the calling process `signal` when the thread `parent` that made it ends, and ends it where
// that has happened already. Safe to call in a child before exec.
void signal_when_parent_ends(pid_t parent, int signal);

// Lets this process, and the programs that it starts, have so many files open as the outputs of `ranks` ranks need, as
// far as the system allows: the usual limit of 1024 is enough for 480.
void raise_descriptor_limit(int64_t ranks);

// Starts `command` in process group `group` with exactly `environment`. It is killed when the calling thread ends. If
// the program cannot be started, the child exits with code 127 and writes the reason to standard error.
// Throws std::runtime_error when no process or pipe can be made.
Child spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment, pid_t group);

}  // namespace tessera

#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/tools/launcher/spawn.h"

namespace tessera::testing {

// Starts a process of the same program that waits at the start of main() and forks a rank for each request.
//
// Loading LibTorch takes a core a quarter of a second, most of the cost of a small test case. With the fork server this
// happens once per test program, not once per rank. A forked rank is equivalent to a new process: the fork server has
// run only what runs before main(), has one thread, and was loaded with OMP_NUM_THREADS=1.
//
// The ranks become children of the process that owns the ForkServer, which can wait for them. Not thread-safe.
class ForkServer {
 public:
  // Throws std::runtime_error when no process can be made.
  ForkServer();
  ~ForkServer();
  ForkServer(const ForkServer&) = delete;
  ForkServer& operator=(const ForkServer&) = delete;

  // Starts a rank like tessera::spawn; `command` holds this program's name, then its arguments. Throws
  // std::runtime_error when the fork server has died.
  Child start(const std::vector<std::string>& command, const std::vector<std::string>& environment, pid_t group);

 private:
  pid_t pid_ = 0;
  int socket_ = -1;
};

// Call it at the start of main(). In a fork server it serves until the owner ends and does not return, except in the
// ranks that it forks, where it returns the command line. In any other process it returns nullopt.
std::optional<std::vector<std::string>> serve_if_fork_server();

}  // namespace tessera::testing

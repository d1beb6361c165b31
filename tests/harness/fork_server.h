#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/tools/launcher/spawn.h"

namespace tessera::testing {

// A process of the same program that waits at the start of main() and forks a rank at each request.
//
// To load LibTorch takes a quarter of a second of a core, most of what a small test case costs: here it is paid once a
// test program and not once a rank. A rank is as good as newly started: nothing has run in the fork server but what
// runs before main(), it has one thread, and OMP_NUM_THREADS was 1 when it was loaded.
//
// The ranks become children of the process that owns the ForkServer, which waits for them as for its own. Not
// thread-safe.
class ForkServer {
 public:
  // Throws std::runtime_error when no process can be made.
  ForkServer();
  ~ForkServer();
  ForkServer(const ForkServer&) = delete;
  ForkServer& operator=(const ForkServer&) = delete;

  // As tessera::spawn: `command` holds this program's name, then its arguments.
  // Throws std::runtime_error when the fork server has died.
  Child start(const std::vector<std::string>& command, const std::vector<std::string>& environment, pid_t group);

 private:
  pid_t pid_ = 0;
  int socket_ = -1;
};

// Called at the start of main(). In a fork server: serves until its owner ends and does not return, but in the ranks
// that it forks, where the result is the command line. In any other process: nullopt.
std::optional<std::vector<std::string>> serve_if_fork_server();

}  // namespace tessera::testing

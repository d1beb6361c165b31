// tools/launch -n 4 PROGRAM ARGS: starts local ranks, prefixes what they print, and ends them together.

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <optional>

#include <fmt/format.h>

#include "tessera/tools/launcher/console.h"
#include "tessera/tools/launcher/job.h"
#include "tessera/tools/launcher/launch_options.h"
#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/signal_queue.h"

namespace tessera {
namespace {

// A file that is opened later must not become a standard stream that the caller has closed.
void open_standard_streams() {
  for (int fd = ::open("/dev/null", O_RDWR); fd >= 0; fd = ::open("/dev/null", O_RDWR)) {
    if (fd <= STDERR_FILENO) continue;
    ::close(fd);
    return;
  }
}

int run(int argc, char** argv) {
  int exit_code = 0;
  const std::optional<LaunchOptions> options = parse_launch_options(argc, argv, exit_code);
  if (!options) return exit_code;
  SignalQueue signals;
  Console console(options->is_bare);
  for (const std::string& parent : {temporary_folder(), std::string(kSharedMemory)}) remove_abandoned_folders(parent);
  return Job(*options, console, signals).run();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::open_standard_streams();
  try {
    return tessera::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "launch: {}\n", error.what());
    return 1;
  }
}

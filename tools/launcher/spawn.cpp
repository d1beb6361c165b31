#include "tessera/tools/launcher/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tessera/tools/launcher/child_process.h"

namespace tessera {
namespace {

// Between fork and exec only functions that are safe in a signal handler are called, since the parent may have other
// threads.

void use_streams(int out, int err) {
  const int empty = ::open("/dev/null", O_RDONLY);
  ::dup2(empty, STDIN_FILENO);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
}

}  // namespace

OutputPipe::OutputPipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw std::runtime_error(fmt::format(
        "a pipe for a rank's output cannot be made: {}; each rank needs two open files of this process: raise "
        "their limit (ulimit -Hn, or LimitNOFILE of a service), or start fewer ranks",
        std::strerror(errno)));
  }
  read_end_ = ends[0];
  write_end_ = ends[1];
  ::fcntl(read_end_, F_SETFL, O_NONBLOCK);
}

OutputPipe::~OutputPipe() {
  if (read_end_ >= 0) ::close(read_end_);
  ::close(write_end_);
}

int OutputPipe::take_read_end() { return std::exchange(read_end_, -1); }

void raise_descriptor_limit(int64_t ranks) {
  constexpr rlim_t kOthers = 64;
  const rlim_t needed = 2 * static_cast<rlim_t>(ranks) + kOthers;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

void signal_when_parent_ends(pid_t parent, int signal) {
  ::prctl(PR_SET_PDEATHSIG, signal);
  // The parent may have died before prctl.
  if (::getppid() != parent) ::_exit(127);
}

Child spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment, pid_t group) {
  const Program program(command, environment);
  OutputPipe out;
  OutputPipe err;
  const pid_t parent = ::getpid();
  const pid_t pid = start_child([&]() -> int {
    ::setpgid(0, group);
    use_default_signals();
    signal_when_parent_ends(parent, SIGKILL);
    use_streams(out.write_end(), err.write_end());
    program.exec();
  });
  ::setpgid(pid, group);
  return {.pid = pid, .out = out.take_read_end(), .err = err.take_read_end()};
}

}  // namespace tessera

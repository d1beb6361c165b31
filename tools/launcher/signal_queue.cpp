#include "tessera/tools/launcher/signal_queue.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

// A handler reaches nothing but global variables.
volatile sig_atomic_t write_end = -1;
volatile sig_atomic_t owner = 0;

// A pipe keeps every signal that comes, also several of one kind. A child has this handler until it starts its program:
// a signal to it ends it, and does not count as one to its parent, whose pipe it shares.
extern "C" void keep_signal(int signal) {
  if (::getpid() != owner) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
    return;
  }
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  if (::write(write_end, &byte, 1) < 0) errno = saved;
  errno = saved;
}

}  // namespace

SignalQueue::SignalQueue() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    throw std::runtime_error(fmt::format("pipe: {}", std::strerror(errno)));
  }
  read_end_ = ends[0];
  write_end = ends[1];
  owner = ::getpid();
  struct sigaction action = {};
  action.sa_handler = keep_signal;
  action.sa_flags = SA_RESTART;
  struct sigaction before = {};
  const bool is_nohup = ::sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler == SIG_IGN;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    if (signal != SIGHUP || !is_nohup) ::sigaction(signal, &action, nullptr);
  }
  ::signal(SIGPIPE, SIG_IGN);
  // A parent that ignores it passes that on, and the system then keeps nothing to wait for of a child that ends.
  ::signal(SIGCHLD, SIG_DFL);
}

int SignalQueue::take() {
  unsigned char byte = 0;
  return ::read(read_end_, &byte, 1) == 1 ? byte : 0;
}

bool asks_to_end(int signal) { return signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT; }

}  // namespace tessera

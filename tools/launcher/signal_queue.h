#pragma once

namespace tessera {

// Catches the signals that a launcher passes on to its ranks (SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2),
// and keeps them in the order in which they come. It leaves SIGHUP alone where that is ignored, as under nohup. It
// ignores SIGPIPE, so that a write whose reader has gone returns an error, and no longer ignores SIGCHLD, so that
// children can be waited for. A process has at most one, for its whole life.
class SignalQueue {
 public:
  // Throws std::runtime_error when no pipe can be made.
  SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  // Returns the oldest signal that was not taken yet, or 0.
  int take();

 private:
  int read_end_ = -1;
};

// Returns whether a signal asks a program to end: SIGINT, SIGTERM, SIGHUP or SIGQUIT.
bool asks_to_end(int signal);

}  // namespace tessera

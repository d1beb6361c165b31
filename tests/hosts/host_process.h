#pragma once

#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tessera::testing {

using Clock = std::chrono::steady_clock;

struct HostLine {
  Clock::time_point time;  // when it was read
  std::string text;
};

struct HostOutcome {
  int exit_code = 0;  // 128 + the signal if the shell was killed
  Clock::time_point ended;
  std::vector<HostLine> lines;  // of both streams

  // Returns the lines that begin with `start`.
  std::vector<HostLine> starting_with(const std::string& start) const;
  std::string text() const;
};

// Holds a shell's command that runs, and reads its output meanwhile. The destructor waits for its end.
class HostProcess {
 public:
  explicit HostProcess(const std::string& command);
  ~HostProcess();
  HostProcess(HostProcess&&) = default;
  HostProcess& operator=(HostProcess&&) = delete;

  // Returns whether a line that begins with `start` came within `limit`.
  bool says(const std::string& start, std::chrono::milliseconds limit) const;
  HostOutcome wait();

 private:
  struct State {
    std::FILE* pipe = nullptr;
    std::mutex mutex;  // guards the outcome until the thread has ended
    HostOutcome outcome;
    std::thread reader;
  };
  static void read(State& state);
  std::unique_ptr<State> state_;
};

// Returns `text` as one word of a shell.
std::string quoted(const std::string& text);

}  // namespace tessera::testing

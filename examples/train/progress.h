#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <ostream>
#include <string>

namespace train {

struct ProgressOptions {
  bool is_line = false;  // one line that changes, for a terminal; else a line for each step shown
  int64_t columns = 80;  // the terminal's width, to which the line is cut
  int64_t first_step = 0;
  int64_t steps = 1;
  int64_t tokens_per_step = 1;
};

// Shows how a run goes on: the step, the loss, tokens per second and the time left.
//
// The line that changes is written so that it passes through pipes that hand on whole lines: it ends with a line feed,
// and the next one begins by going up one line and clearing it.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  Progress(std::ostream& out, const ProgressOptions& options, Clock::time_point start = Clock::now());

  // Shows that `step` steps are done.
  void show(int64_t step, double loss, Clock::time_point now = Clock::now());
  // Writes a line that stays, above the line that changes. Any thread may call it.
  void say(const std::string& text);

  double tokens_per_second(int64_t step, Clock::time_point now = Clock::now()) const;

 private:
  std::string text_of(int64_t step, double loss, Clock::time_point now) const;

  std::ostream& out_;
  ProgressOptions options_;
  Clock::time_point start_;
  std::mutex mutex_;   // guards out_ and shown_
  std::string shown_;  // the line that changes, as it is now
};

// Says whether progress is one line that changes: by what `choice` says, or, where that is "auto", where standard
// output is a terminal.
bool is_progress_line(const std::string& choice);
// Returns the terminal's width: of standard output, else of COLUMNS, else 80.
int64_t terminal_columns();

}  // namespace train

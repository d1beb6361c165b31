#include "tessera/examples/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>
#include <cmath>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include <fmt/format.h>

namespace train {
namespace {

constexpr const char* kUpAndClear = "\x1b[1A\x1b[2K";

// Returns "1:02:03" or "2:03".
std::string time_text(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace

Progress::Progress(std::ostream& out, const ProgressOptions& options, Clock::time_point start)
    : out_(out), options_(options), start_(start) {}

double Progress::tokens_per_second(int64_t step, Clock::time_point now) const {
  const double seconds = std::max(1e-6, std::chrono::duration<double>(now - start_).count());
  return static_cast<double>((step - options_.first_step) * options_.tokens_per_step) / seconds;
}

std::string Progress::text_of(int64_t step, double loss, Clock::time_point now) const {
  const double rate = tokens_per_second(step, now);
  const double left = static_cast<double>((options_.steps - step) * options_.tokens_per_step) / std::max(rate, 1e-6);
  return fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left", step, options_.steps, loss, rate,
                     time_text(left));
}

void Progress::show(int64_t step, double loss, Clock::time_point now) {
  const std::string text = text_of(step, loss, now);
  const std::lock_guard lock(mutex_);
  if (!options_.is_line) {
    out_ << text << std::endl;
    return;
  }
  out_ << (shown_.empty() ? "" : kUpAndClear);
  shown_ = text.substr(0, static_cast<std::size_t>(options_.columns) - 1);
  out_ << shown_ << std::endl;
}

void Progress::say(const std::string& text) {
  const std::lock_guard lock(mutex_);
  out_ << (shown_.empty() ? "" : kUpAndClear) << text << '\n';
  if (!shown_.empty()) out_ << shown_ << '\n';
  out_ << std::flush;
}

bool is_progress_line(const std::string& choice) {
  return choice == "line" || (choice == "auto" && ::isatty(STDOUT_FILENO) == 1);
}

int64_t terminal_columns() {
  winsize size = {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1) return size.ws_col;
  const char* const columns = std::getenv("COLUMNS");
  const int64_t given = columns == nullptr ? 0 : std::atoll(columns);
  return given > 1 ? given : 80;
}

}  // namespace train

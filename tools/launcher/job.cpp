#include "tessera/tools/launcher/job.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string_view>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLastWords{2};
constexpr int kTimeLimitCode = 124;
constexpr std::chrono::seconds kUsualLimit{300};
constexpr std::chrono::seconds kWaitersFirst{2};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// Returns the limit of the ranks' waits. Where TESSERA_TIMEOUT is wrong, the ranks themselves say so.
std::chrono::seconds limit_of_waits() {
  const char* const text = std::getenv("TESSERA_TIMEOUT");
  const std::string_view digits = text == nullptr ? "" : text;
  int64_t seconds = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), seconds);
  const bool is_number =
      error == std::errc() && end == digits.data() + digits.size() && seconds > 0 && seconds <= 1'000'000;
  return is_number ? std::chrono::seconds(seconds) : kUsualLimit;
}

// Returns text that no other job has.
std::string new_job_id() {
  return fmt::format("{}-{}", std::chrono::system_clock::now().time_since_epoch().count(), ::getpid());
}

}  // namespace

Job::Job(const LaunchOptions& options, Console& console, SignalQueue& signals)
    : options_(options), console_(console), signals_(signals), id_(new_job_id()), size_(options.size) {
  if (options.time_limit_s > 0) limit_ = Clock::now() + milliseconds(options.time_limit_s);
}

int Job::run() {
  try {
    return finish(run_attempts());
  } catch (const std::exception& error) {
    console_.say(fmt::format("launch: {}", error.what()));
    return finish(is_over() ? over_code() : 1);
  }
}

// Returns the exit code of the last attempt.
int Job::run_attempts() {
  while (true) {
    const ProcessGroupResult result = run_ranks();
    const bool may_restart = result.failure && restart_ < options_.restarts && !is_over();
    if (!may_restart) {
      if (exit_code(result) != 0) console_.say(fmt::format("launch: {}", outcome(result)));
      return exit_code(result);
    }
    const std::string why = outcome(result);
    ++restart_;
    if (options_.min_ranks > 0) size_ = std::max(options_.min_ranks, size_ - 1);
    console_.say(fmt::format("launch: {}; restart {} of {} starts, with {} rank{}", why, restart_, options_.restarts,
                             size_, size_ == 1 ? "" : "s"));
  }
}

ProcessGroupResult Job::run_ranks() {
  const PrivateFolder folder;
  ProcessGroupOptions group = group_options(folder.path() + "/store");
  raise_descriptor_limit(size_);  // mpirun needs them too
  std::optional<MpiJob> mpi;
  const auto pass_on = [&] {
    if (!mpi || !group.sinks.has_room(OutputStream::kStderr)) return;
    for (const std::string& line : mpi->new_lines()) console_.say("[mpirun] " + line);
  };
  if (options_.backend == "mpi") {
    mpi.emplace(size_, [this] { return why_over(); });
    group.rank_variables = [&](int64_t rank) { return mpi->variables(rank); };
    group.take_signal = [&, take = group.take_signal] {
      pass_on();
      return take();
    };
  }
  if (limit_) group.time_limit = std::chrono::duration_cast<std::chrono::milliseconds>(*limit_ - Clock::now());
  ProcessGroupResult result = run_process_group(group);
  pass_on();
  return result;
}

ProcessGroupOptions Job::group_options(const std::string& store_path) {
  ProcessGroupOptions group = {.command = options_.command,
                               .size = size_,
                               .store_path = store_path,
                               .stopped_limit = limit_of_waits() + kWaitersFirst,
                               .sinks = console_.sinks(),
                               .take_signal = [this, store_path] { return take_signal(store_path); }};
  // SIGTERM comes a second before SIGKILL.
  group.signal_grace = milliseconds(options_.grace_s - 1);
  if (!options_.backend.empty()) group.environment["TESSERA_BACKEND"] = options_.backend;
  if (options_.restarts > 0) {
    group.environment["TORCHELASTIC_RUN_ID"] = id_;
    group.environment["TORCHELASTIC_RESTART_COUNT"] = std::to_string(restart_);
    group.environment["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(options_.restarts);
  }
  return group;
}

// Where output can no longer be written, ranks are asked to end as by SIGTERM, once.
int Job::take_signal(const std::string& store_path) {
  int signal = signals_.take();
  if (signal == 0 && end_signal_ == 0 && !console_.broken().empty()) {
    // A rank that had failed before is the reason why the job ends.
    is_broken_ = !std::filesystem::exists(lost_rank_file(store_path));
    signal = SIGTERM;
  }
  if (asks_to_end(signal)) end_signal_ = signal;
  return signal;
}

int Job::exit_code(const ProcessGroupResult& result) const {
  if (is_broken_) return console_.broken_code();
  if (result.failure) return result.failure->shell_code();
  return result.timed_out ? kTimeLimitCode : 0;
}

// Says how ranks were ended that did not all end well.
std::string Job::outcome(const ProcessGroupResult& result) const {
  if (is_broken_) return fmt::format("{}; the ranks were ended", console_.broken());
  if (result.failure) return result.failure->to_string() + (size_ > 1 ? "; the other ranks were ended" : "");
  return fmt::format("not done after {} s, when rank{} {} still ran; the ranks were ended", options_.time_limit_s,
                     result.running.size() == 1 ? "" : "s", fmt::join(result.running, ", "));
}

// Returns whether the time limit has passed or a signal has asked to end.
bool Job::is_over() {
  while (const int signal = signals_.take()) {
    if (asks_to_end(signal)) end_signal_ = signal;
  }
  return end_signal_ != 0 || (limit_ && Clock::now() > *limit_);
}

// Returns "" where it is not over.
std::string Job::why_over() {
  if (!is_over()) return "";
  if (end_signal_ != 0) return fmt::format("signal {} came", end_signal_);
  return fmt::format("the time limit of {} s (--time-limit) passed", options_.time_limit_s);
}

// Returns the exit code of a job that is over and has none of a rank.
int Job::over_code() const { return end_signal_ != 0 ? 128 + end_signal_ : kTimeLimitCode; }

int Job::finish(int code) {
  const Clock::time_point until = Clock::now() + kLastWords;
  const bool is_patient = code == 0 && !is_over();
  const bool is_whole = console_.finish([&] { return is_patient ? !is_over() : Clock::now() < until; });
  if (code != 0) return code;
  if (const std::string broken = console_.broken(); !broken.empty()) {  // after the last rank had ended
    console_.say(fmt::format("launch: {}; the end of the output is lost", broken));
    console_.finish([until = Clock::now() + kLastWords] { return Clock::now() < until; });
    return console_.broken_code();
  }
  return is_whole ? 0 : over_code();
}

}  // namespace tessera

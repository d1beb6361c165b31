#include "tessera/tools/launcher/process_group.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tessera/tools/launcher/rank_environment.h"
#include "tessera/tools/launcher/reserved_notes.h"
#include "tessera/tools/launcher/signal_queue.h"
#include "tessera/tools/launcher/subreaper.h"
#include "tessera/tools/launcher/watchdog.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPollInterval{10};
constexpr std::chrono::milliseconds kTermToKill{1000};
constexpr std::chrono::milliseconds kStoppedItself{1000};  // between two looks at the ranks
constexpr std::chrono::milliseconds kReapInterval{1000};

std::vector<std::string> note_files(const ProcessGroupOptions& options) {
  std::vector<std::string> files = {lost_rank_file(options.store_path)};
  for (int64_t rank = 0; rank < options.size; ++rank) files.push_back(ended_rank_file(options.store_path, rank));
  return files;
}

// Holds what is known of one rank's process.
struct RankProcess {
  pid_t pid = 0;                                     // 0 once it has ended
  std::optional<Clock::time_point> stopped_at = {};  // while it is stopped
  std::chrono::seconds stopped_for{0};               // when it was killed for that
};

// Says whether a process is stopped now. A debugger lets it go on without a word to its parent.
bool is_stopped(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');
  return name_end != std::string::npos && text.compare(name_end, 3, ") T") == 0;
}

class ProcessGroup {
 public:
  explicit ProcessGroup(const ProcessGroupOptions& options);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  ProcessGroupResult run();

 private:
  void start_rank(int64_t rank);
  bool any_running() const;
  void reap();
  std::optional<int> ended(RankProcess& rank);
  void reap_left_behind();
  RankExit exit_of(std::size_t rank, int status) const;
  void note_failure(const RankExit& failure);
  void pass_on_signals();
  void keep_time();
  void end_stopped();
  void end_after(std::chrono::milliseconds wait);

  const ProcessGroupOptions& options_;
  const ReservedNotes notes_;
  const Subreaper subreaper_;  // made before the group has a process
  ProcessGroupResult result_;
  pid_t group_ = 0;
  std::vector<RankProcess> ranks_;
  Clock::time_point looked_at_ = Clock::now();  // when end_stopped() was called last
  Clock::time_point reaped_at_ = Clock::now();  // when reap_left_behind() looked last
  RankOutputs outputs_;
  std::optional<Clock::time_point> limit_;
  std::optional<Clock::time_point> term_at_;
  std::optional<Clock::time_point> kill_at_;
};

// Ranks would take notes of an earlier job with the same store for their own, so ReservedNotes removes them.
ProcessGroup::ProcessGroup(const ProcessGroupOptions& options)
    : options_(options), notes_(note_files(options)), outputs_(options.sinks) {
  raise_descriptor_limit(options.size);
  if (options.time_limit) limit_ = Clock::now() + *options.time_limit;
  group_ = spawn_watchdog(options.store_path.empty() ? "" : "TESSERA_STORE=" + options.store_path);
}

ProcessGroup::~ProcessGroup() {
  ::kill(-group_, SIGKILL);
  for (const RankProcess& rank : ranks_) {
    if (rank.pid == 0) continue;
    ::kill(rank.pid, SIGKILL);  // it may have left the group
    ::waitpid(rank.pid, nullptr, 0);
  }
  ::waitpid(group_, nullptr, 0);
  subreaper_.end_all();
}

ProcessGroupResult ProcessGroup::run() {
  for (int64_t rank = 0; rank < options_.size; ++rank) start_rank(rank);
  while (any_running()) {
    outputs_.read(kPollInterval);
    reap();
    pass_on_signals();
    keep_time();
  }
  outputs_.drain();
  return result_;
}

void ProcessGroup::start_rank(int64_t rank) {
  std::map<std::string, std::string> extra = options_.environment;
  if (options_.rank_variables) extra.merge(options_.rank_variables(rank));
  const Child child =
      options_.spawn(options_.command, rank_environment(rank, options_.size, options_.store_path, extra), group_);
  ranks_.push_back({.pid = child.pid});
  outputs_.add(rank, child);
}

bool ProcessGroup::any_running() const {
  return std::ranges::any_of(ranks_, [](const RankProcess& rank) { return rank.pid != 0; });
}

RankExit ProcessGroup::exit_of(std::size_t rank, int status) const {
  RankExit exit = {.rank = static_cast<int64_t>(rank),
                   .exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                   .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0,
                   .stopped_for = ranks_[rank].stopped_for};
  exit.early = exit.signal == 0 && options_.is_done && !options_.is_done(exit.rank);
  return exit;
}

// Returns the status of a rank that has ended since the last call. Notes when one is stopped, and when it goes on.
std::optional<int> ProcessGroup::ended(RankProcess& rank) {
  while (rank.pid != 0) {
    int status = 0;
    const pid_t changed = ::waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED);
    if (changed < 0 && errno == ECHILD) {
      rank.pid = 0;
      throw std::runtime_error(fmt::format(
          "rank {} has ended, and how is not known ({}): a process that starts ranks must not ignore SIGCHLD, nor wait "
          "for children that it has not started itself",
          &rank - ranks_.data(), std::strerror(ECHILD)));
    }
    if (changed != rank.pid) break;
    if (WIFSTOPPED(status)) {
      rank.stopped_at = Clock::now();
    } else if (WIFCONTINUED(status)) {
      rank.stopped_at.reset();
    } else {
      rank.pid = 0;
      return status;
    }
  }
  return std::nullopt;
}

void ProcessGroup::reap() {
  std::vector<RankExit> failures;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::optional<int> status = ended(ranks_[rank]);
    if (!status) continue;
    const RankExit exit = exit_of(rank, *status);
    if (exit.failed()) {
      failures.push_back(exit);
    } else if (any_running()) {
      ReservedNotes::write(ended_rank_file(options_.store_path, exit.rank), exit.to_string());
    }
  }
  reap_left_behind();
  if (failures.empty() || result_.failure || result_.timed_out) return;
  // If several ranks failed since the last check, one that was killed or exited early is the likeliest cause of the
  // others.
  const auto killed =
      std::find_if(failures.begin(), failures.end(), [](const RankExit& e) { return e.signal != 0 || e.early; });
  note_failure(killed != failures.end() ? *killed : failures.front());
}

// A process whose parent has ended becomes this process's child, in whatever group it is, and is a zombie until this
// process waits for it.
void ProcessGroup::reap_left_behind() {
  const Clock::time_point now = Clock::now();
  if (now - reaped_at_ < kReapInterval) return;
  reaped_at_ = now;
  subreaper_.reap(
      [this](pid_t pid) { return pid == group_ || std::ranges::find(ranks_, pid, &RankProcess::pid) != ranks_.end(); });
}

void ProcessGroup::note_failure(const RankExit& failure) {
  result_.failure = failure;
  ReservedNotes::write(lost_rank_file(options_.store_path), failure.to_string());
  end_after(options_.grace);
}

void ProcessGroup::pass_on_signals() {
  if (!options_.take_signal) return;
  while (const int signal = options_.take_signal()) {
    ::kill(-group_, signal);
    if (asks_to_end(signal)) end_after(options_.signal_grace);
  }
}

void ProcessGroup::keep_time() {
  const Clock::time_point now = Clock::now();
  if (limit_ && now >= *limit_ && !result_.failure && !result_.timed_out && any_running()) {
    result_.timed_out = true;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].pid != 0) result_.running.push_back(static_cast<int64_t>(rank));
    }
    ::kill(-group_, SIGTERM);
    end_after(options_.signal_grace);
  }
  if (options_.stopped_limit) end_stopped();
  if (term_at_ && now >= *term_at_) {
    ::kill(-group_, SIGTERM);
    term_at_.reset();
  }
  if (kill_at_ && now >= *kill_at_) {
    for (const RankProcess& rank : ranks_) {
      if (rank.pid != 0) ::kill(rank.pid, SIGKILL);
    }
    kill_at_.reset();
  }
}

void ProcessGroup::end_stopped() {
  const Clock::time_point now = Clock::now();
  const Clock::duration since = now - std::exchange(looked_at_, now);
  for (RankProcess& rank : ranks_) {
    if (rank.pid == 0 || !rank.stopped_at) continue;
    if (since > kStoppedItself) *rank.stopped_at += since;
    const Clock::duration time = now - *rank.stopped_at;
    if (time < *options_.stopped_limit || !is_stopped(rank.pid)) continue;
    rank.stopped_for = std::chrono::duration_cast<std::chrono::seconds>(time);
    ::kill(rank.pid, SIGKILL);
  }
}

// Ranks that are to be ended earlier already are left at that.
void ProcessGroup::end_after(std::chrono::milliseconds wait) {
  const Clock::time_point term_at = Clock::now() + wait;
  if (kill_at_ && *kill_at_ <= term_at + kTermToKill) return;
  term_at_ = term_at;
  kill_at_ = term_at + kTermToKill;
}

}  // namespace

std::string RankExit::to_string() const {
  if (signal == SIGKILL && stopped_for.count() > 0)
    return fmt::format("rank {} was stopped for {} s and then killed", rank, stopped_for.count());
  return signal != 0
             ? fmt::format("rank {} was killed by signal {}", rank, signal)
             : fmt::format("rank {} exited with code {}{}", rank, exit_code, early ? " before it was done" : "");
}

std::string lost_rank_file(const std::string& store_path) { return store_path + ".lost"; }
std::string ended_rank_file(const std::string& store_path, int64_t rank) {
  return fmt::format("{}.{}", lost_rank_file(store_path), rank);
}

ProcessGroupResult run_process_group(const ProcessGroupOptions& options) {
  if (options.command.empty()) throw std::invalid_argument("run_process_group: the command is empty; name a program");
  if (options.size < 1) {
    throw std::invalid_argument(
        fmt::format("run_process_group: {} ranks were asked for; at least 1 is needed", options.size));
  }
  // This process becomes the parent of processes that ranks leave behind; two groups at once would kill each other's.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  return ProcessGroup(options).run();
}

}  // namespace tessera

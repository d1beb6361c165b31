#include "tessera/tests/harness/ranks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "tessera/tests/harness/assertion_counts.h"
#include "tessera/tests/harness/fork_server.h"
#include "tessera/tests/harness/over_mpi.h"
#include "tessera/tests/harness/report_file.h"
#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/process_group.h"

namespace tessera::testing {
namespace {

constexpr std::size_t kShownLines = 200;
// After a failure the other ranks have 3 seconds to see it and end.
constexpr std::chrono::milliseconds kGrace{3000};

// Returns a doctest filter that matches `name`. A comma and a backslash have another meaning in filters.
std::string filter_for(const char* name) {
  std::string filter = name;
  std::replace_if(
      filter.begin(), filter.end(), [](char c) { return c == ',' || c == '\\' || c == '"'; }, '?');
  return filter;
}

RunAsThreads run_threads = nullptr;

// Returns whether this test's target asks for ranks that are threads, by `backends` of tools/build_defs.bzl.
bool are_threads() {
  const char* const kind = std::getenv("TESSERA_TEST_RANKS");
  return kind != nullptr && std::string_view(kind) == "threads";
}

// Describes one run of a body on one number of ranks: each process's output, and how the run ended.
struct Run {
  int64_t size;
  PrivateFolder folder;
  std::vector<std::vector<std::string>> lines;
  ProcessGroupResult result;

  int64_t processes() const { return are_threads() ? 1 : size; }
  std::string store() const { return folder.path() + "/store"; }
};

// Returns the fork server of this test program; the first case that needs it makes it.
ForkServer& fork_server() {
  static ForkServer only;
  return only;
}

// Returns the function that starts ranks. It makes the fork server before the process group, since the group's
// Subreaper would kill one that is made later.
decltype(ProcessGroupOptions::spawn) starter() {
  if (std::getenv("TESSERA_TEST_EXEC") != nullptr) return spawn;
  return [&from = fork_server()](const auto& command, const auto& environment, pid_t group) {
    return from.start(command, environment, group);
  };
}

void start(Run& run, const char* name, const char* place, std::chrono::milliseconds limit) {
  const bool show_all = std::getenv("TESSERA_TEST_VERBOSE") != nullptr;
  run.lines.resize(static_cast<std::size_t>(run.processes()));
  const auto spawn_rank = starter();
  std::optional<MpiJob> mpi;
  if (is_over_mpi()) mpi.emplace(run.size);
  std::map<std::string, std::string> variables = {{kCaseVariable, place}};
  if (are_threads()) variables[kThreadsVariable] = std::to_string(run.size);
  run.result = run_process_group({
      .command = {std::filesystem::read_symlink("/proc/self/exe"), "--test-case=" + filter_for(name), "--no-version",
                  "--no-intro", "--no-colors"},
      .size = run.processes(),
      .store_path = run.store(),
      .environment = variables,
      .rank_variables = [&](int64_t rank) { return mpi ? mpi->variables(rank) : std::map<std::string, std::string>(); },
      .time_limit = limit,
      .grace = kGrace,
      .spawn = spawn_rank,
      .is_done = [&](int64_t rank) { return std::filesystem::exists(end_file(run.store(), rank)); },
      .sinks = {.on_line =
                    [&](int64_t rank, OutputStream, std::string_view line) {
                      if (show_all) fmt::print("[{}] {}\n", rank, line);
                      run.lines[static_cast<std::size_t>(rank)].emplace_back(line);
                    }},
  });
}

// Returns the rank that failed before the others: one that was killed or exited early, else the one whose check failed
// first, else the one that ended first. Peers of a lost rank fail too, and some of them before it ends.
int64_t first_failure(const Run& run) {
  if (run.result.failure->signal != 0 || run.result.failure->early) return run.result.failure->rank;
  int64_t first = run.result.failure->rank;
  int64_t earliest = INT64_MAX;
  for (int64_t rank = 0; rank < run.processes(); ++rank) {
    const std::optional<std::string> time = read_report_file(failure_file(run.store(), rank));
    if (!time || time->empty() || std::stoll(*time) >= earliest) continue;
    earliest = std::stoll(*time);
    first = rank;
  }
  return first;
}

std::string output_of(const Run& run, int64_t rank) {
  const std::vector<std::string>& lines = run.lines[static_cast<std::size_t>(rank)];
  std::string text;
  const std::size_t skipped = lines.size() > kShownLines ? lines.size() - kShownLines : 0;
  if (skipped > 0) text += fmt::format("  ({} lines before these)\n", skipped);
  for (std::size_t i = skipped; i < lines.size(); ++i) text += fmt::format("  [{}] {}\n", rank, lines[i]);
  return text.empty() ? fmt::format("  [{}] (wrote nothing)\n", rank) : text;
}

// Describes how a run failed whose ranks are threads.
std::string describe_failed_threads(const Run& run, std::chrono::milliseconds limit) {
  const std::string start = fmt::format("on {} ranks, which are threads: ", run.size);
  if (run.result.timed_out) {
    return fmt::format("{}not done after {} s; they wrote:\n{}", start, static_cast<double>(limit.count()) / 1000,
                       output_of(run, 0));
  }
  const RankExit& exit = *run.result.failure;
  std::string how = exit.signal != 0 || exit.early ? "their process, as " + exit.to_string() : "one failed";
  if (exit.signal != 0) {
    how +=
        " (doctest may crash when several threads leave a CAPTURE by exceptions: ranks that are processes show these)";
  }
  return fmt::format("{}{}, and wrote:\n{}", start, how, output_of(run, 0));
}

std::string describe_failure(const Run& run, std::chrono::milliseconds limit) {
  if (are_threads()) return describe_failed_threads(run, limit);
  if (run.result.timed_out) {
    const int64_t rank = run.result.running.front();
    return fmt::format("on {} ranks: not done after {} s; still running: rank {}. Rank {} wrote:\n{}", run.size,
                       static_cast<double>(limit.count()) / 1000, fmt::join(run.result.running, ", "), rank,
                       output_of(run, rank));
  }
  const int64_t rank = first_failure(run);
  const RankExit& exit = *run.result.failure;
  const std::string how = exit.signal != 0 || exit.early ? exit.to_string() : fmt::format("rank {} failed", rank);
  return fmt::format("on {} ranks: {}, the first to fail, and wrote:\n{}", run.size, how, output_of(run, rank));
}

// Fails the test case, or marks it as skipped, or adds the ranks' assertions. Returns whether it goes on.
bool report(const Run& run, std::chrono::milliseconds limit) {
  if (!run.result.ok()) {
    const std::string message = describe_failure(run, limit);
    FAIL(message);
  }
  for (int64_t rank = 0; rank < run.processes(); ++rank) {
    if (const std::optional<RankSkip> skipped = skip_of(run.store(), rank)) {
      const std::string who = are_threads() ? "which are threads" : fmt::format("rank {}", rank);
      const std::string reason = fmt::format("on {} ranks, {}: {}", run.size, who, skipped->reason);
      skipped->is_missing ? skip_missing(reason) : skip(reason);
      return false;
    }
  }
  int64_t assertions = 0;
  for (int64_t rank = 0; rank < run.processes(); ++rank) {
    const AssertionCounts counts = parse_counts(read_report_file(end_file(run.store(), rank)).value_or(""));
    add_assertions(counts);
    assertions += sum(counts);
  }
  if (assertions == 0) {
    const std::string message = fmt::format("on {} ranks: no rank has evaluated an assertion", run.size);
    FAIL(message);
  }
  return true;
}

void check_sizes(const Ranks& ranks) {
  if (ranks.sizes().empty()) {
    FAIL("no number of ranks is given, so that nothing would run; give at least one, as in {1, 2}");
  }
  for (const int64_t size : ranks.sizes()) {
    if (size >= 1) continue;
    const std::string message = fmt::format("{} is no number of ranks; give numbers of at least 1", size);
    FAIL(message);
  }
}

// Returns the time limit of one number of ranks: what TESSERA_TEST_SECONDS says, or that of the test case.
std::chrono::milliseconds limit_of(const Ranks& ranks) {
  const char* const given = std::getenv("TESSERA_TEST_SECONDS");
  if (given == nullptr) return ranks.limit();
  const int seconds = std::atoi(given);
  if (seconds <= 0) FAIL("TESSERA_TEST_SECONDS is no number of seconds: ", given);
  return std::chrono::seconds(seconds);
}

}  // namespace

bool use_to_run_threads(RunAsThreads run) {
  run_threads = run;
  return true;
}

void run_on_ranks(const char* name, const char* place, const Ranks& ranks, void (*body)()) {
  if (is_rank()) {
    // The filter may match other cases too.
    if (std::strcmp(std::getenv(kCaseVariable), place) != 0) return;
    body_begins();
    const char* const threads = std::getenv(kThreadsVariable);
    threads == nullptr ? body() : run_threads(std::stoll(threads), body, limit_of(ranks) / 2);
    return;
  }
  check_sizes(ranks);
  if (is_over_mpi() && !why_no_mpi().empty()) return skip_missing(why_no_mpi());
  if (are_threads() && run_threads == nullptr) {
    FAIL(
        "TESSERA_TEST_RANKS=threads, but this program lacks the library that runs ranks as threads; link "
        "//tests/harness:world");
  }
  for (const int64_t size : ranks.sizes()) {
    Run run = {.size = size, .folder = {}, .lines = {}, .result = {}};
    start(run, name, place, limit_of(ranks));
    if (!report(run, limit_of(ranks))) return;
  }
}

}  // namespace tessera::testing

#include "tessera/tests/harness/ranks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

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

// Describes one run of a body on one number of ranks: each rank's output, and how the run ended.
struct Run {
  int64_t size;
  PrivateFolder folder;
  std::vector<std::vector<std::string>> lines;
  ProcessGroupResult result;

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
  run.lines.resize(static_cast<std::size_t>(run.size));
  const auto spawn_rank = starter();
  std::optional<MpiJob> mpi;
  if (is_over_mpi()) mpi.emplace(run.size);
  run.result = run_process_group({
      .command = {std::filesystem::read_symlink("/proc/self/exe"), "--test-case=" + filter_for(name), "--no-version",
                  "--no-intro", "--no-colors"},
      .size = run.size,
      .store_path = run.store(),
      .environment = {{kCaseVariable, place}},
      .rank_variables = [&](int64_t rank) { return mpi ? mpi->variables(rank) : std::map<std::string, std::string>(); },
      .time_limit = limit,
      .grace = kGrace,
      .spawn = spawn_rank,
      .is_done = [&](int64_t rank) { return std::filesystem::exists(end_file(run.store(), rank)); },
      .on_line =
          [&](int64_t rank, OutputStream, std::string_view line) {
            if (show_all) fmt::print("[{}] {}\n", rank, line);
            run.lines[static_cast<std::size_t>(rank)].emplace_back(line);
          },
  });
}

// Returns the rank that failed before the others: one that was killed or exited early, else the one whose check failed
// first, else the one that ended first. Peers of a lost rank fail too, and some of them before it ends.
int64_t first_failure(const Run& run) {
  if (run.result.failure->signal != 0 || run.result.failure->early) return run.result.failure->rank;
  int64_t first = run.result.failure->rank;
  int64_t earliest = INT64_MAX;
  for (int64_t rank = 0; rank < run.size; ++rank) {
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

std::string describe_failure(const Run& run, std::chrono::milliseconds limit) {
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
  for (int64_t rank = 0; rank < run.size; ++rank) {
    if (const std::optional<RankSkip> skipped = skip_of(run.store(), rank)) {
      const std::string reason = fmt::format("on {} ranks, rank {}: {}", run.size, rank, skipped->reason);
      skipped->is_missing ? skip_missing(reason) : skip(reason);
      return false;
    }
  }
  int64_t assertions = 0;
  for (int64_t rank = 0; rank < run.size; ++rank) {
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

}  // namespace

void run_on_ranks(const char* name, const char* place, const Ranks& ranks, void (*body)()) {
  if (is_rank()) {
    // The filter may match other cases too.
    if (std::strcmp(std::getenv(kCaseVariable), place) != 0) return;
    body_begins();
    body();
    return;
  }
  check_sizes(ranks);
  if (is_over_mpi() && !why_no_mpi().empty()) return skip_missing(why_no_mpi());
  for (const int64_t size : ranks.sizes()) {
    Run run = {.size = size, .folder = {}, .lines = {}, .result = {}};
    start(run, name, place, ranks.limit());
    if (!report(run, ranks.limit())) return;
  }
}

}  // namespace tessera::testing

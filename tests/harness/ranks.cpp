#include "tessera/tests/harness/ranks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "tessera/tests/harness/nursery.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/process_group.h"

namespace tessera::testing {
namespace {

constexpr std::size_t kShownLines = 200;
// The others have 3 seconds to see the failure and end; a test that waits for them is a slow test.
constexpr std::chrono::milliseconds kGrace{3000};

// Matches `name` in doctest's filter, where a comma or a backslash would mean something else.
std::string filter_for(const char* name) {
  std::string filter = name;
  std::replace_if(
      filter.begin(), filter.end(), [](char c) { return c == ',' || c == '\\' || c == '"'; }, '?');
  return filter;
}

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// One run of a body on one number of ranks: what each rank wrote, and how it ended.
struct Run {
  int64_t size;
  PrivateFolder folder;
  std::vector<std::vector<std::string>> lines;
  ProcessGroupResult result;

  std::string store() const { return folder.path() + "/store"; }
};

// One for the life of the test program, made by the first case that needs it.
Child start_from_nursery(const std::vector<std::string>& command, const std::vector<std::string>& environment, pid_t group) {
  static Nursery nursery;
  return nursery.start(command, environment, group);
}

void start(Run& run, const char* name, std::chrono::milliseconds limit) {
  const bool show_all = std::getenv("TESSERA_TEST_VERBOSE") != nullptr;
  run.lines.resize(static_cast<std::size_t>(run.size));
  run.result = run_process_group({
      .command = {std::filesystem::read_symlink("/proc/self/exe"), "--test-case=" + filter_for(name), "--no-version",
                  "--no-intro", "--no-colors"},
      .size = run.size,
      .store_path = run.store(),
      .environment = {{kCaseVariable, name}},
      .time_limit = limit,
      .grace = kGrace,
      .spawn = std::getenv("TESSERA_TEST_EXEC") != nullptr ? spawn : start_from_nursery,
      .on_line =
          [&](int64_t rank, OutputStream, std::string_view line) {
            if (show_all) fmt::print("[{}] {}\n", rank, line);
            run.lines[static_cast<std::size_t>(rank)].emplace_back(line);
          },
  });
}

// The rank that failed before the others: one that was killed, else the one whose check failed first, else the one that ended
// first. Peers of a lost rank fail too, some of them sooner than it ends.
int64_t first_failure(const Run& run) {
  if (run.result.failure->signal != 0) return run.result.failure->rank;
  int64_t first = run.result.failure->rank;
  int64_t earliest = INT64_MAX;
  for (int64_t rank = 0; rank < run.size; ++rank) {
    const std::optional<std::string> time = read_file(failure_file(run.store(), rank));
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
  const std::string how =
      run.result.failure->signal != 0 ? run.result.failure->to_string() : fmt::format("rank {} failed", rank);
  return fmt::format("on {} ranks: {}, before any other, and wrote:\n{}", run.size, how, output_of(run, rank));
}

void report(const Run& run, std::chrono::milliseconds limit) {
  if (!run.result.ok()) {
    const std::string message = describe_failure(run, limit);
    FAIL(message);
  }
  for (int64_t rank = 0; rank < run.size; ++rank) {
    if (const auto reason = read_file(skip_file(run.store(), rank))) {
      skip(fmt::format("on {} ranks, rank {}: {}", run.size, rank, *reason));
      return;
    }
  }
}

}  // namespace

void run_on_ranks(const char* name, const Ranks& ranks, void (*body)()) {
  if (is_rank()) {
    // A filter may match more cases than the one that was meant.
    if (std::strcmp(std::getenv(kCaseVariable), name) == 0) body();
    return;
  }
  for (const int64_t size : ranks.sizes()) {
    Run run = {.size = size, .folder = {}, .lines = {}, .result = {}};
    start(run, name, ranks.limit());
    report(run, ranks.limit());
  }
  // A body without checks counts too: that every rank ended well is one.
  CHECK(true);
}

}  // namespace tessera::testing

// Runs two processes that make a World, work and end, under LeakSanitizer, and counts which leaks of other
// libraries tests/harness/lsan.supp keeps quiet.

#include <chrono>
#include <cstdint>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/tests/harness/sanitizers.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/process_group.h"

using namespace tessera;
using tessera::testing::contains;

namespace {

constexpr const char* kSuppressions = "tests/harness/lsan.supp";
constexpr int kLeaksFound = 23;
// Limits how many allocations that kSuppressions keeps quiet a rank may leave.
constexpr int64_t kMostSuppressed = 0;

#define TESSERA_SKIP_WITHOUT_LEAKS() \
  if (!testing::kAddressSanitizer) TESSERA_SKIP("no LeakSanitizer is here; run tools/test --full=sanitized_ranks")

struct Job {
  ProcessGroupResult result;
  std::map<int64_t, std::string> text;  // keyed by rank
};

Job run_job(const std::vector<std::string>& arguments) {
  const PrivateFolder folder;
  std::vector<std::string> command = {"tests/leaks/world_job"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  Job job;
  job.result = run_process_group({
      .command = command,
      .size = 2,
      .store_path = folder.path() + "/store",
      .environment = {{"ASAN_OPTIONS", fmt::format("detect_leaks=1:exitcode={}", kLeaksFound)},
                      {"LSAN_OPTIONS", fmt::format("suppressions={}:print_suppressions=1", kSuppressions)}},
      .time_limit = std::chrono::seconds(120),
      .grace = std::chrono::seconds(60),  // a report takes its time
      .sinks = {.on_line = [&](int64_t rank, OutputStream,
                               std::string_view line) { job.text[rank] += fmt::format("  {}\n", line); }},
  });
  return job;
}

// Returns the lines of "Suppressions used:": how many allocations each suppression has kept quiet.
std::map<std::string, int64_t> suppressed_in(const std::string& text) {
  std::map<std::string, int64_t> counts;
  const std::regex row(R"(\n +(\d+) +\d+ (\S[^\n]*))");
  const std::size_t table = text.find("Suppressions used:");
  if (table == std::string::npos) return counts;
  for (std::sregex_iterator it(text.begin() + static_cast<std::ptrdiff_t>(table), text.end(), row), end; it != end;
       ++it) {
    counts[(*it)[2]] += std::stoll((*it)[1]);
  }
  return counts;
}

std::set<std::string> listed_suppressions() {
  std::set<std::string> listed;
  std::ifstream in(kSuppressions);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("leak:")) listed.insert(line.substr(5));
  }
  return listed;
}

// Checks that both ranks' results are right, and that they leave no memory but what is listed with a reason.
void check_leaves_nothing(const Job& job) {
  for (int64_t rank = 0; rank < 2; ++rank) {
    const std::string text = job.text.at(rank);
    CAPTURE(text);
    CHECK(contains(text, "the results are right"));
    int64_t total = 0;
    for (const auto& [name, count] : suppressed_in(text)) {
      CHECK(listed_suppressions().contains(name));
      total += count;
    }
    CHECK(total <= kMostSuppressed);
    MESSAGE(fmt::format("rank {} leaves {} allocations of other libraries: {}", rank, total, suppressed_in(text)));
  }
  CHECK(job.result.ok());
}

}  // namespace

TEST_CASE("ranks that make a world, reduce, redistribute and end leave no memory") {
  TESSERA_SKIP_WITHOUT_LEAKS();
  check_leaves_nothing(run_job({"reduce"}));
}

TEST_CASE("ranks that train, save asynchronously, load and go on leave no memory") {
  TESSERA_SKIP_WITHOUT_LEAKS();
  const PrivateFolder folder;
  check_leaves_nothing(run_job({"train", folder.path() + "/states"}));
}

TEST_CASE("ranks of a job that fails leave no memory") {
  TESSERA_SKIP_WITHOUT_LEAKS();
  check_leaves_nothing(run_job({"fail"}));
}

TEST_CASE("memory that a rank loses is found") {
  TESSERA_SKIP_WITHOUT_LEAKS();
  const Job job = run_job({"lose"});
  REQUIRE(job.result.failure.has_value());
  CHECK(job.result.failure->exit_code == kLeaksFound);
  const std::string text = job.text.at(job.result.failure->rank);
  CAPTURE(text);
  CHECK(contains(text, "the results are right"));
  CHECK(contains(text, "LeakSanitizer: detected memory leaks"));
  CHECK(contains(text, "lose_memory"));
}

TEST_CASE("the table of suppressions is read") {
  const std::string text =
      "  x\n  Suppressions used:\n    count      bytes template\n        3         24 gomp_malloc\n"
      "        1          8 a b\n  -----\n";
  CHECK(suppressed_in(text) == std::map<std::string, int64_t>{{"gomp_malloc", 3}, {"a b", 1}});
  CHECK(suppressed_in("  nothing\n").empty());
}

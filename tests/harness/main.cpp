// This is the main function of every test. It runs doctest and prints two last lines, "[tessera] N assertions" and
// "[tessera] N passed, N failed, N skipped", in test cases, which tools/test adds up. For a test case that was skipped
// it prints one line, "[tessera] skipped: NAME: REASON", or "[tessera] missing: ..." where tools/setup would install
// what the reason names. A test case without an assertion fails. In a rank of TESSERA_RANKS_TEST_CASE it writes no such
// lines, but reports to the parent when the first check failed, and how many assertions ran. TESSERA_TEST_REPORT names
// a file for the counts of every case and subcase.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/tests/harness/assertion_counts.h"
#include "tessera/tests/harness/fork_server.h"
#include "tessera/tests/harness/rank_report.h"
#include "tessera/tests/harness/report_file.h"
#include "tessera/tests/harness/skip.h"

namespace tessera::testing {
namespace {

struct Counts {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
};

Counts counts;

// Holds why the running test case is skipped, which any of its threads may say: each access holds the mutex.
class SkipNow {
 public:
  void add(const std::string& reason, bool is_missing) {
    const std::lock_guard lock(mutex_);
    reasons_ += (reasons_.empty() ? "" : "; ") + reason;
    (is_missing ? missing_ : skipped_) = true;
    if (is_rank()) report_skip(reasons_, missing_);
  }
  // Returns how the line of the test case continues after "[tessera] ", or "" where it was not skipped, and forgets it.
  std::string take(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const std::string line =
        missing_ || skipped_ ? (missing_ ? "missing: " : "skipped: ") + name + ": " + reasons_ : std::string();
    reasons_.clear();
    missing_ = skipped_ = false;
    return line;
  }

 private:
  std::mutex mutex_;
  std::string reasons_;
  bool missing_ = false, skipped_ = false;
};

SkipNow skip_now;

int64_t monotonic_nanoseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

class Listener : public doctest::IReporter {
 public:
  explicit Listener(const doctest::ContextOptions&) {}

  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_start(const doctest::TestCaseData& data) override {
    name_ = data.m_name;
    enter_case(name_);
  }
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    const std::string skipped = skip_now.take(name_);
    const bool empty = !is_rank() && skipped.empty() && stats.testCaseSuccess && assertions_of_case() == 0;
    if (empty) std::printf("[tessera] failed: %s: it has evaluated no assertion\n", name_.c_str());
    const bool failed = !stats.testCaseSuccess || empty;
    if (!failed && !skipped.empty() && !is_rank()) std::printf("[tessera] %s\n", skipped.c_str());
    ++(failed ? counts.failed : skipped.empty() ? counts.passed : counts.skipped);
  }
  void test_case_exception(const doctest::TestCaseException&) override { note_failure(); }
  void subcase_start(const doctest::SubcaseSignature& subcase) override {
    if (ThreadRank::is_here()) {
      throw std::logic_error(
          "SUBCASE does not work in ranks that are threads; let the ranks of this test be processes");
    }
    enter_subcase(subcase.m_name.c_str());
  }
  void subcase_end() override { leave_subcase(); }
  void log_assert(const doctest::AssertData& data) override {
    if ((data.m_at & doctest::assertType::is_warn) != 0) return;
    add_assertion();
    if (data.m_failed) note_failure();
  }
  void log_message(const doctest::MessageData& data) override {
    if ((data.m_severity & doctest::assertType::is_warn) == 0) note_failure();
  }
  void test_case_skipped(const doctest::TestCaseData& data) override {
    if (data.m_skip) ++counts.skipped;
  }

 private:
  // Any thread may be the first. Where the file cannot be written, another rank may be named as the first to fail.
  void note_failure() {
    if (!is_rank() || noted_.exchange(true)) return;
    std::ofstream(failure_file(store_path(), process_rank())) << monotonic_nanoseconds();
  }

  std::string name_;  // of the running test case
  std::atomic<bool> noted_ = false;
};

DOCTEST_REGISTER_LISTENER("tessera", 1, Listener);

void skip_as(const std::string& reason, bool is_missing) {
  skip_now.add(ThreadRank::is_here() ? "rank " + std::to_string(rank()) + ": " + reason : reason, is_missing);
}

// Writes what the parent of a rank, or the user, reads of this program's assertions. Returns whether it could.
bool write_reports() {
  try {
    report_end();
    const char* const path = is_rank() ? nullptr : std::getenv("TESSERA_TEST_REPORT");
    if (path != nullptr) write_report_file(path, to_lines(assertion_counts()));
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the counts of assertions are lost: %s\n", error.what());
    return false;
  }
}

}  // namespace

void skip(const std::string& reason) { skip_as(reason, false); }
void skip_missing(const std::string& reason) { skip_as(reason, true); }

}  // namespace tessera::testing

int main(int argc, char** argv) {
  using tessera::testing::counts;
  // This comes first, so that nothing else has run in the process before a fork server forks a rank.
  std::vector<const char*> arguments(argv, argv + argc);
  const std::optional<std::vector<std::string>> of_rank = tessera::testing::serve_if_fork_server();
  if (of_rank) {
    arguments.clear();
    for (const std::string& argument : *of_rank) arguments.push_back(argument.c_str());
  }
  doctest::Context context(static_cast<int>(arguments.size()), arguments.data());
  int code = context.run();
  if (context.shouldExit()) return code;
  if (!tessera::testing::write_reports()) code = 1;
  if (of_rank) {
    // Destroying LibTorch's static objects takes longer than most bodies, so forked ranks skip it. Ranks that are
    // started as programs do it.
    std::fflush(nullptr);
    ::_exit(code);
  }
  if (tessera::testing::is_rank()) return code;
  std::printf("[tessera] %lld assertions\n",
              static_cast<long long>(tessera::testing::sum(tessera::testing::assertion_counts())));
  std::printf("[tessera] %d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
  return code != 0 ? code : counts.failed > 0;
}

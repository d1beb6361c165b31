// This is the main function of every test. It runs doctest and prints two last lines, "[tessera] N assertions" and
// "[tessera] N passed, N failed, N skipped", in test cases, which tools/test adds up. A test case without an assertion
// fails. In a rank of TESSERA_RANKS_TEST_CASE it writes no such lines, but reports to the parent when the first check
// failed, and how many assertions ran. TESSERA_TEST_REPORT names a file for the counts of every case and subcase.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tests/harness/assertion_counts.h"
#include "tessera/tests/harness/fork_server.h"
#include "tessera/tests/harness/rank_report.h"
#include "tessera/tests/harness/skip.h"

namespace tessera::testing {
namespace {

struct Counts {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
};

Counts counts;
bool skipped_now = false;
const char* case_now = "";

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
    skipped_now = false;
    case_now = data.m_name;
    enter_case(data.m_name);
  }
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    const bool empty = !is_rank() && !skipped_now && stats.testCaseSuccess && assertions_of_case() == 0;
    if (empty) std::printf("[tessera] failed: %s: it has evaluated no assertion\n", case_now);
    int& count = !stats.testCaseSuccess || empty ? counts.failed : skipped_now ? counts.skipped : counts.passed;
    ++count;
  }
  void test_case_exception(const doctest::TestCaseException&) override { note_failure(); }
  void subcase_start(const doctest::SubcaseSignature& subcase) override { enter_subcase(subcase.m_name.c_str()); }
  void subcase_end() override { leave_subcase(); }
  void log_assert(const doctest::AssertData& data) override {
    add_assertion();
    if (data.m_failed && (data.m_at & doctest::assertType::is_warn) == 0) note_failure();
  }
  void log_message(const doctest::MessageData& data) override {
    if ((data.m_severity & doctest::assertType::is_warn) == 0) note_failure();
  }
  void test_case_skipped(const doctest::TestCaseData& data) override {
    if (data.m_skip) ++counts.skipped;
  }

 private:
  void note_failure() {
    if (noted_ || !is_rank()) return;
    noted_ = true;
    std::ofstream(failure_file(store_path(), rank())) << monotonic_nanoseconds();
  }

  bool noted_ = false;
};

DOCTEST_REGISTER_LISTENER("tessera", 1, Listener);

void write_report() {
  if (const char* const path = std::getenv("TESSERA_TEST_REPORT")) std::ofstream(path) << to_lines(assertion_counts());
}

}  // namespace

void skip(const std::string& reason) {
  skipped_now = true;
  if (is_rank()) {
    std::ofstream(skip_file(store_path(), rank())) << reason;
    return;
  }
  std::printf("[tessera] skipped: %s: %s\n", case_now, reason.c_str());
}

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
  const int code = context.run();
  if (context.shouldExit()) return code;
  tessera::testing::report_end();
  if (of_rank) {
    // Destroying LibTorch's static objects takes longer than most bodies, so forked ranks skip it. Ranks that are
    // started as programs do it.
    std::fflush(nullptr);
    ::_exit(code);
  }
  if (tessera::testing::is_rank()) return code;
  tessera::testing::write_report();
  std::printf("[tessera] %lld assertions\n",
              static_cast<long long>(tessera::testing::sum(tessera::testing::assertion_counts())));
  std::printf("[tessera] %d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
  return code != 0 ? code : counts.failed > 0;
}

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/assertion_counts.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/process_group.h"

using tessera::PrivateFolder;
using tessera::ProcessGroupResult;
using tessera::Program;
using tessera::start_child;
using tessera::wait_for;
using tessera::testing::contains;

namespace {

struct Outcome {
  int exit_code = 0;
  std::string text;
  double seconds = 0;
};

// Runs one case of a program, as the only rank of a process group.
Outcome run_case_of(const std::string& program, const std::string& test_case,
                    const std::map<std::string, std::string>& environment) {
  const PrivateFolder folder;
  Outcome outcome;
  const auto begin = std::chrono::steady_clock::now();
  const ProcessGroupResult result = tessera::run_process_group({
      .command = {program, "--test-case=" + test_case},
      .store_path = folder.path() + "/store",
      .environment = environment,
      .time_limit = std::chrono::seconds(50),
      // Each line is indented, since count_test_cases.py counts "[tessera]" only where it begins a line, and these
      // lines are the inner program's.
      .sinks = {.on_line = [&](int64_t, tessera::OutputStream,
                               std::string_view line) { outcome.text += "  " + std::string(line) + "\n"; }},
  });
  outcome.exit_code = result.timed_out ? 124 : result.failure ? result.failure->shell_code() : 0;
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return outcome;
}

Outcome run_case(const std::string& test_case, const std::string& pids = "") {
  return run_case_of("tests/harness/failing_ranks", test_case, {{"TESSERA_TEST_PIDS", pids}});
}

// Runs one case of failing_threads, whose ranks are threads.
Outcome run_threads(const std::string& test_case) {
  return run_case_of("tests/harness/failing_threads", test_case, {{"TESSERA_TEST_RANKS", "threads"}});
}

std::vector<pid_t> pids_in(const std::string& folder) {
  std::vector<pid_t> pids;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    pids.push_back(std::stoi(entry.path().filename().string()));
  }
  return pids;
}

bool alive(pid_t pid) { return ::kill(pid, 0) == 0; }

// Waits until none of `pids` exists: a killed process stays visible until its new parent has waited for it.
bool all_gone(const std::vector<pid_t>& pids) {
  for (int tries = 0; tries < 300; ++tries) {
    bool any = false;
    for (const pid_t pid : pids) any = any || alive(pid);
    if (!any) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace

TEST_CASE("cases that pass on every number of ranks pass") {
  for (const char* name : {"all is well", "a name? with a comma"}) {
    const Outcome outcome = run_case(name);
    INFO(outcome.text);
    CHECK(outcome.exit_code == 0);
    CHECK(contains(outcome.text, "[tessera] 1 passed, 0 failed, 0 skipped"));
  }
}

TEST_CASE("the rank that failed first is named, with its own message and nobody else's") {
  const Outcome outcome = run_case("a check fails on rank 1*");
  INFO(outcome.text);
  CHECK(outcome.exit_code == 1);
  CHECK(contains(outcome.text, "on 2 ranks: rank 1 failed"));
  CHECK(contains(outcome.text, "the first message"));
  CHECK_FALSE(contains(outcome.text, "the second message"));
  CHECK_FALSE(contains(outcome.text, "on 4 ranks"));
  CHECK(contains(outcome.text, "[tessera] 0 passed, 1 failed, 0 skipped"));
}

TEST_CASE("ranks that are started as programs of their own do the same") {
  ::setenv("TESSERA_TEST_EXEC", "1", 1);
  const Outcome good = run_case("all is well");
  const Outcome bad = run_case("a check fails on rank 1*");
  ::unsetenv("TESSERA_TEST_EXEC");
  CHECK(good.exit_code == 0);
  INFO(bad.text);
  CHECK(contains(bad.text, "on 2 ranks: rank 1 failed"));
  CHECK(contains(bad.text, "the first message"));
}

TEST_CASE("an exception of a rank is shown") {
  const Outcome outcome = run_case("an exception on rank 2");
  INFO(outcome.text);
  CHECK(outcome.exit_code == 1);
  CHECK(contains(outcome.text, "on 3 ranks: rank 2 failed"));
  CHECK(contains(outcome.text, "thrown by rank 2"));
}

TEST_CASE("a rank that was killed is named, not the peer that lost it") {
  const Outcome outcome = run_case("rank 1 is killed*");
  INFO(outcome.text);
  CHECK(contains(outcome.text, "on 2 ranks: rank 1 was killed by signal 9"));
  CHECK(outcome.seconds < 5);
}

TEST_CASE("a rank that hangs is ended at the time limit, and its child too") {
  const PrivateFolder pids;
  const Outcome outcome = run_case("rank 1 hangs*", pids.path());
  INFO(outcome.text);
  CHECK(outcome.exit_code == 1);
  CHECK(contains(outcome.text, "on 2 ranks: not done after 2 s; still running: rank 1"));
  CHECK(contains(outcome.text, "rank 1 goes to sleep"));
  CHECK(outcome.seconds < 10);
  CHECK(pids_in(pids.path()).size() == 3);
  CHECK(all_gone(pids_in(pids.path())));
}

TEST_CASE("a rank that ends before its body does has failed, whatever its exit code") {
  struct Row {
    const char* test_case;
    const char* want;
  };
  const std::vector<Row> rows = {
      {"every rank leaves by exit(0)", "on 1 ranks: rank 0 exited with code 0 before it was done"},
      {"rank 1 leaves by exit(0)*", "on 2 ranks: rank 1 exited with code 0 before it was done"},
      {"rank 0 leaves by _exit(0)", "on 2 ranks: rank 0 exited with code 0 before it was done"},
      {"rank 0 leaves by quick_exit(0)*", "on 2 ranks: rank 0 exited with code 0 before it was done"},
      {"rank 1 leaves by _exit(3)", "on 2 ranks: rank 1 exited with code 3 before it was done"},
      {"a child of rank 1*", "on 2 ranks: rank 1 exited with code 0 before it was done"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.test_case);
    const Outcome outcome = run_case(row.test_case);
    INFO(outcome.text);
    CHECK(outcome.exit_code == 1);
    CHECK(contains(outcome.text, row.want));
    CHECK(contains(outcome.text, "[tessera] 0 passed, 1 failed, 0 skipped"));
  }
}

TEST_CASE("a daemon that a rank leaves behind is ended with the case") {
  for (const char* exec : {"", "1"}) {
    CAPTURE(exec);
    if (*exec != '\0') ::setenv("TESSERA_TEST_EXEC", exec, 1);
    const PrivateFolder pids;
    const Outcome outcome = run_case("rank 1 leaves a daemon", pids.path());
    ::unsetenv("TESSERA_TEST_EXEC");
    INFO(outcome.text);
    CHECK(outcome.exit_code == 0);
    REQUIRE(pids_in(pids.path()).size() == 1);
    CHECK_FALSE(alive(pids_in(pids.path()).front()));
  }
}

TEST_CASE("no numbers of ranks, or one below 1, are refused before anything runs") {
  const Outcome none = run_case("no number of ranks");
  INFO(none.text);
  CHECK(none.exit_code == 1);
  CHECK(contains(none.text, "no number of ranks is given"));
  const Outcome negative = run_case("fewer than no ranks");
  INFO(negative.text);
  CHECK(negative.exit_code == 1);
  CHECK(contains(negative.text, "-2 is no number of ranks; give numbers of at least 1"));
}

TEST_CASE("of two cases of one name each runs its own body") {
  const Outcome outcome = run_case("a name that two cases have");
  INFO(outcome.text);
  CHECK(contains(outcome.text, "[tessera] 1 passed, 1 failed, 0 skipped"));
  CHECK(contains(outcome.text, "the second one's body"));
  CHECK_FALSE(contains(outcome.text, "the first one's body"));
}

TEST_CASE("a rank that ignores SIGTERM is killed") {
  const Outcome outcome = run_case("rank 1 ignores*");
  INFO(outcome.text);
  CHECK(contains(outcome.text, "not done after 1 s; still running: rank 1"));
  CHECK(outcome.seconds < 10);
}

TEST_CASE("no rank survives when the test itself is killed") {
  const PrivateFolder pids;
  const Program ranks_that_wait({"tests/harness/failing_ranks", "--test-case=all ranks wait*"});
  const pid_t test = start_child([&]() -> int {
    ::setenv("TESSERA_TEST_PIDS", pids.path().c_str(), 1);
    ranks_that_wait.exec();
  });
  for (int tries = 0; tries < 1000 && pids_in(pids.path()).size() < 3; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const std::vector<pid_t> ranks = pids_in(pids.path());
  CHECK(ranks.size() == 3);
  CHECK(alive(ranks.at(0)));
  ::kill(test, SIGKILL);
  wait_for(test);
  CHECK(all_gone(ranks));
}

TEST_CASE("a case that evaluates no assertion fails, on ranks and alone") {
  const Outcome on_ranks = run_case("ranks check nothing");
  INFO(on_ranks.text);
  CHECK(on_ranks.exit_code == 1);
  CHECK(contains(on_ranks.text, "on 2 ranks: no rank has evaluated an assertion"));
  CHECK(contains(on_ranks.text, "[tessera] 0 passed, 1 failed, 0 skipped"));
  const Outcome alone = run_case("one process checks nothing");
  INFO(alone.text);
  CHECK(alone.exit_code == 1);
  CHECK(contains(alone.text, "[tessera] failed: one process checks nothing: it has evaluated no assertion"));
  CHECK(contains(alone.text, "[tessera] 0 passed, 1 failed, 0 skipped"));
}

TEST_CASE("a warning is no assertion") {
  const Outcome outcome = run_case("one process only warns");
  INFO(outcome.text);
  CHECK(outcome.exit_code == 1);
  CHECK(contains(outcome.text, "[tessera] failed: one process only warns: it has evaluated no assertion"));
  CHECK(contains(outcome.text, "[tessera] 0 assertions"));
}

TEST_CASE("assertions are counted by case and subcase, over all ranks") {
  CHECK(contains(run_case("all is well").text, "[tessera] 4 assertions\n"));
  const PrivateFolder folder;
  const std::string report = folder.path() + "/report";
  ::setenv("TESSERA_TEST_REPORT", report.c_str(), 1);
  const Outcome outcome = run_case("assertions in subcases*");
  ::unsetenv("TESSERA_TEST_REPORT");
  INFO(outcome.text);
  std::ifstream file(report);
  const std::string lines((std::istreambuf_iterator<char>(file)), {});
  CHECK(lines ==
        "6\tassertions in subcases of ranks\n"
        "3\tassertions in subcases of ranks\tone\n"
        "3\tassertions in subcases of ranks\ttwo\tinner\n"
        "2\tassertions in subcases of threads\touter\n");
  CHECK(contains(outcome.text, "[tessera] 14 assertions\n"));
}

TEST_CASE("counts that cannot be written fail the test") {
  const auto reported_to = [](const char* report, const std::string& test_case) {
    ::setenv("TESSERA_TEST_REPORT", report, 1);
    const Outcome outcome = run_case(test_case);
    ::unsetenv("TESSERA_TEST_REPORT");
    return outcome;
  };
  const Outcome full = reported_to("/dev/full", "all is well");
  INFO(full.text);
  CHECK(full.exit_code == 1);
  CHECK(contains(full.text, "the counts of assertions are lost: /dev/full cannot be written; is the disk full?"));
  const Outcome tab = reported_to("/dev/null", "a name*with a tab");
  INFO(tab.text);
  CHECK(tab.exit_code == 1);
  CHECK(contains(tab.text, "has a tab or a newline; give a test another name"));
}

TEST_CASE("counts of names with a tab or a newline are refused, others are read as they were written") {
  using namespace tessera::testing;
  const AssertionCounts counts = {{{"a case", "a subcase"}, 3}, {{"a case"}, 2}};
  CHECK(parse_counts(to_lines(counts)) == counts);
  for (const char* name : {"a\tcase", "a\ncase"}) {
    CHECK_THROWS_WITH_AS(to_lines({{{"a case", name}, 1}}), doctest::Contains("has a tab or a newline"),
                         std::invalid_argument);
  }
}

TEST_CASE("a failing subcase fails the case") {
  const Outcome outcome = run_case("subcases run*");
  INFO(outcome.text);
  CHECK(contains(outcome.text, "on 2 ranks: rank 1 failed"));
  CHECK(contains(outcome.text, "two"));
}

TEST_CASE("a skipped case is counted as skipped and says why") {
  const Outcome in_rank = run_case("rank 0 cannot run it");
  INFO(in_rank.text);
  CHECK(in_rank.exit_code == 0);
  CHECK(contains(in_rank.text, "rank 0 cannot run it: on 1 ranks, rank 0: no unicorn here"));
  CHECK(contains(in_rank.text, "[tessera] 0 passed, 0 failed, 1 skipped"));
  const Outcome alone = run_case("one process cannot run it");
  CHECK(contains(alone.text, "[tessera] skipped: one process cannot run it: no dragon here"));
  CHECK(contains(alone.text, "[tessera] 0 passed, 0 failed, 1 skipped"));
  const Outcome threads = run_case("threads are skipped at once");
  INFO(threads.text);
  CHECK(contains(threads.text, "[tessera] 8 assertions"));
  CHECK(contains(threads.text, "[tessera] 0 passed, 0 failed, 1 skipped"));
}

TEST_CASE("a case that lacks a program says so in one line, however often it is skipped") {
  const Outcome on_ranks = run_case("ranks cannot run it for want of a program");
  INFO(on_ranks.text);
  CHECK(contains(on_ranks.text,
                 "[tessera] missing: ranks cannot run it for want of a program: on 1 ranks, rank 0: no griffin"));
  CHECK(contains(on_ranks.text, "[tessera] 0 passed, 0 failed, 1 skipped"));  // nothing ran on 2 ranks
  const Outcome twice = run_case("one process is skipped twice");
  INFO(twice.text);
  CHECK(contains(twice.text, "[tessera] missing: one process is skipped twice: no dragon here; no griffin"));
  CHECK(contains(twice.text, "[tessera] 0 passed, 0 failed, 1 skipped"));
  const Outcome failed = run_case("one process fails before it is skipped");
  INFO(failed.text);
  CHECK_FALSE(contains(failed.text, "missing: "));
  CHECK(contains(failed.text, "[tessera] 0 passed, 1 failed, 0 skipped"));
}

TEST_CASE("ranks that are threads have a world, and their assertions count") {
  const Outcome outcome = run_threads("all is well");
  INFO(outcome.text);
  CHECK(outcome.exit_code == 0);
  CHECK(contains(outcome.text, "[tessera] 8 assertions"));
  CHECK(contains(outcome.text, "[tessera] 1 passed, 0 failed, 0 skipped"));
  const Outcome skipped = run_threads("rank 1 is skipped");
  CHECK(contains(skipped.text,
                 "[tessera] skipped: rank 1 is skipped: on 2 ranks, which are threads: rank 1: it lacks something"));
}

TEST_CASE("a failing rank that is a thread fails the case, with its number and its text") {
  struct Row {
    const char* test_case;
    std::vector<const char*> want;
  };
  const std::vector<Row> rows = {
      {"a check fails on rank 1", {"on 2 ranks, which are threads: one failed", "rank 1 of 2", "the message"}},
      {"a requirement fails*", {"on 2 ranks, which are threads: one failed", "rank 1 of 2", "REQUIRE( rank() == 0 )"}},
      {"an exception on rank 2", {"on 3 ranks, which are threads: one failed", "rank 2 of 3: thrown by rank 2"}},
      {"rank 1 waits for ever", {"on 2 ranks, which are threads: not done after 2 s"}},
      {"nothing is checked", {"on 2 ranks: no rank has evaluated an assertion"}},
      {"a subcase", {"SUBCASE does not work in ranks that are threads"}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.test_case);
    const Outcome outcome = run_threads(row.test_case);
    INFO(outcome.text);
    CHECK(outcome.exit_code == 1);
    for (const char* want : row.want) CHECK(contains(outcome.text, want));
    CHECK(contains(outcome.text, "[tessera] 0 passed, 1 failed, 0 skipped"));
    CHECK_FALSE(contains(outcome.text, "on 4 ranks"));
    CHECK(outcome.seconds < 10);
  }
  const Outcome unlinked =
      run_case_of("tests/harness/failing_ranks", "all is well", {{"TESSERA_TEST_RANKS", "threads"}});
  CHECK(contains(unlinked.text, "link //tests/harness:world"));
}

TEST_CASE("outside a rank there is no rank") {
  CHECK_THROWS_WITH_AS(tessera::testing::rank(), doctest::Contains("TESSERA_RANKS_TEST_CASE"), std::logic_error);
}

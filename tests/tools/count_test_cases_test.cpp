// Gives tools/count_test_cases.py logs and events of tests, as Bazel writes them, and reads what it counts.

#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

using nlohmann::json;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

namespace {

struct Run {
  std::string label;
  std::string status;
  std::string log;
};

// Returns what the program says of these runs of a part of tools/test, after Bazel has ended with `code`. `environment`
// stands before it.
ShellOutcome counted(const std::vector<Run>& runs, int code = 0,
                     const std::string& environment = "CI=", const std::string& part = "long") {
  const tessera::PrivateFolder folder;
  std::ofstream events(folder.path() + "/" + part + ".json");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::string log = folder.path() + "/" + std::to_string(i) + ".log";
    std::ofstream(log) << runs[i].log;
    const json output = {{"name", "test.log"}, {"uri", "file://" + log}};
    events << json({{"id", {{"testResult", {{"label", runs[i].label}}}}},
                    {"testResult", {{"status", runs[i].status}, {"testActionOutput", {output}}}}})
                  .dump()
           << "\n";
  }
  events.close();
  return shell(environment + " python3 tools/count_test_cases.py " + std::to_string(code) + " " + folder.path() + "/" +
               part + ".json");
}

// Returns what a test of two cases says where the second lacks something.
std::string skips(const std::string& why) { return why + "\n[tessera] 1 passed, 0 failed, 1 skipped\n"; }

const std::string kMissing = "[tessera] missing: a case: mpirun is not installed; tools/setup installs it";
const std::string kNoMpi = "[tessera] missing: a case: this build has no MPI; tools/setup installs it";

}  // namespace

TEST_CASE("a program counts as one case") {
  const tessera::PrivateFolder folder;
  std::ofstream(folder.path() + "/fuzz.program") << "passed\n";
  CHECK(shell("python3 tools/count_test_cases.py 0 " + folder.path() + "/*").output ==
        "0 assertions\n1 passed, 0 failed\n");
  std::ofstream(folder.path() + "/faults_mpi.program") << "failed\n";
  const ShellOutcome outcome = shell("python3 tools/count_test_cases.py 0 " + folder.path() + "/*");
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output == "failed: faults_mpi\n0 assertions\n1 passed, 1 failed\n");
}

TEST_CASE("cases and assertions are added up") {
  const ShellOutcome outcome =
      counted({{"//a:one", "PASSED", "[tessera] 7 assertions\n[tessera] 2 passed, 0 failed, 0 skipped\n"},
               {"//a:two", "PASSED", "[tessera] 5 assertions\n[tessera] 3 passed, 0 failed, 1 skipped\n"}});
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.output == "12 assertions\n5 passed, 0 failed, 1 skipped\n");
}

TEST_CASE("what fails, says nothing, runs not at all or is not built has failed") {
  const std::string good = "[tessera] 7 assertions\n[tessera] 2 passed, 0 failed, 0 skipped\n";
  const ShellOutcome failed =
      counted({{"//a:one", "FAILED", "[tessera] 7 assertions\n[tessera] 2 passed, 3 failed, 0 skipped\n"}}, 3);
  CHECK(failed.exit_code == 1);
  CHECK(failed.output == "failed: //a:one: 3 (failed)\n7 assertions\n2 passed, 3 failed\n");
  const ShellOutcome crashed = counted({{"//a:one", "FAILED", "Segmentation fault\n"}}, 3);
  CHECK(crashed.output == "failed: //a:one: 1 (failed, no report of test cases)\n0 assertions\n0 passed, 1 failed\n");
  const ShellOutcome late = counted({{"//a:one", "TIMEOUT", good}}, 3);
  CHECK(late.output == "failed: //a:one: 1 (timeout)\n7 assertions\n2 passed, 1 failed\n");
  CHECK(counted({}).exit_code == 1);
  const ShellOutcome not_built = counted({{"//a:one", "PASSED", good}}, 1);
  CHECK(not_built.exit_code == 1);
  CHECK(not_built.output.find("2 passed, 1 failed\n") != std::string::npos);
}

TEST_CASE("a case that was skipped for a missing program fails in CI, and only there") {
  const std::vector<Run> runs = {{"//a:one", "PASSED", skips(kMissing)}};
  for (const char* const environment : {"CI=", "CI=false", "CI=0", "-u CI"}) {
    CAPTURE(environment);
    const ShellOutcome here = counted(runs, 0, std::string("env ") + environment);
    CHECK(here.exit_code == 0);
    CHECK(here.output ==
          "skipped: //a:one: a case: mpirun is not installed; tools/setup installs it\n0 assertions\n"
          "1 passed, 0 failed, 1 skipped\n");
  }
  const ShellOutcome in_ci = counted(runs, 0, "CI=true");
  CHECK(in_ci.exit_code == 1);
  CHECK(in_ci.output.find("failed, since CI may lack nothing: //a:one: a case: mpirun is not installed") !=
        std::string::npos);
  CHECK(in_ci.output.find("1 passed, 1 failed\n") != std::string::npos);
}

TEST_CASE("in CI a skip is a failure by what it lacks, and in which part of tools/test") {
  struct Row {
    const char* why;
    std::string line;
    std::string part;
    const char* want;
  };
  const std::string unfit = "[tessera] skipped: a case: over Gloo every rank has a part";
  const std::vector<Row> rows = {
      {"a program", kMissing, "long", "1 passed, 1 failed\n"},
      {"a program, where MPI may lack", kMissing, "without_mpi", "1 passed, 1 failed\n"},
      {"MPI", kNoMpi, "long", "1 passed, 1 failed\n"},
      {"MPI, where it may lack", kNoMpi, "without_mpi", "1 passed, 0 failed, 1 skipped\n"},
      {"nothing", unfit, "long", "1 passed, 0 failed, 1 skipped\n"},
      {"nothing, but a name that says so", "[tessera] skipped: missing: is not installed: x", "long",
       "1 passed, 0 failed, 1 skipped\n"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const ShellOutcome outcome = counted({{"//a:one", "PASSED", skips(row.line)}}, 0, "CI=true", row.part);
    CAPTURE(outcome.output);
    CHECK(outcome.output.ends_with(row.want));
  }
}

TEST_CASE("no more cases fail for what is missing than were skipped") {
  const ShellOutcome outcome = counted({{"//a:one", "PASSED", skips(kMissing + "\n" + kMissing)}}, 0, "CI=true");
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.ends_with("1 passed, 1 failed\n"));
  CHECK(outcome.output.find("failed: //a:one: 1 (passed)") != std::string::npos);
}

#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/faults/fault_plan.h"
#include "tessera/tests/faults/outcome.h"
#include "tessera/tests/faults/remains.h"
#include "tessera/tests/faults/rows.h"
#include "tessera/tests/harness/over_mpi.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera::faults;
using tessera::PrivateFolder;

namespace {

const std::string kLost =
    "rank 0, aten::mm: all_reduce on mesh dimension tp of {tp: 3} on cpu over ranks [0, 1, 2]: a peer was lost: rank 2 "
    "was killed by signal 9";

// Is the outcome of a job of three ranks whose last one was killed in its third step, where all is as promised.
Outcome as_promised() {
  Outcome outcome;
  outcome.victims = {2};
  outcome.fault_time = 100;
  outcome.all_ended = 100.6;
  for (const int64_t rank : {0, 1}) outcome.ranks[rank] = {.ended = 100.5, .said = 100.4, .errors = {kLost}};
  outcome.ranks[2] = {};
  outcome.whole_states = {"1 aa", "2 bb", "3 cc"};
  outcome.newest_reported = 1;
  outcome.loaded = {"2 bb", "2 bb", "2 bb"};
  return outcome;
}

// Returns the aspects that the judge finds wrong, in the order in which it finds them.
std::vector<std::string> missed(const Outcome& outcome) {
  std::vector<std::string> aspects;
  for (const Miss& miss : judge(outcome)) aspects.push_back(miss.aspect);
  return aspects;
}

using Aspects = std::vector<std::string>;

}  // namespace

TEST_CASE("the judge holds nothing against an outcome that is as promised") {
  CHECK(missed(as_promised()).empty());
  Outcome at_the_end = as_promised();
  at_the_end.ranks[0] = {.ended = 100.1, .done = true};
  CHECK(missed(at_the_end).empty());
  Outcome over_mpi = as_promised();
  over_mpi.ranks[0].errors = {"rank 0: the job has failed: a peer was lost: MPI: ranks [2] have come to their end"};
  CHECK(missed(over_mpi).empty());
}

TEST_CASE("the judge allows five seconds, however long the limit, where survivors need not wait for it") {
  Outcome outcome = as_promised();
  outcome.limit_s = 20;
  outcome.ranks[1].said = 105.2;
  outcome.ranks[1].ended = 105.3;
  CHECK(missed(outcome).empty());
  outcome.is_noticed = true;
  CHECK(missed(outcome) == Aspects{"in time"});
  outcome.ranks[1].said = 104.9;
  CHECK(missed(outcome).empty());
  outcome.limit_s = 2;
  CHECK(missed(outcome) == Aspects{"in time"});
}

TEST_CASE("the judge reports a survivor that ended late, was ended by a signal, or did not end") {
  Outcome late = as_promised();
  late.ranks[1].said = 104.1;
  late.ranks[1].ended = 104.2;
  CHECK(missed(late) == Aspects{"in time"});
  Outcome in_time = as_promised();
  in_time.ranks[1].said = 103.9;
  in_time.ranks[1].ended = 104.3;
  CHECK(missed(in_time).empty());
  CHECK(exits_late(in_time));
  CHECK_FALSE(exits_late(as_promised()));
  Outcome leaves_slowly = as_promised();
  leaves_slowly.ranks[1].ended = 104.6;
  CHECK(missed(leaves_slowly) == Aspects{"in time"});
  Outcome says_nothing = as_promised();
  says_nothing.names_victim = false;
  says_nothing.ranks[1] = {.ended = 104.1};
  CHECK(missed(says_nothing) == Aspects{"in time"});
  Outcome signalled = as_promised();
  signalled.ranks[0].ended = std::nullopt;
  CHECK(missed(signalled) == Aspects{"in time"});
  Outcome hangs = as_promised();
  hangs.timed_out = true;
  CHECK(missed(hangs) == Aspects{"in time"});
  Outcome victim_late = as_promised();
  victim_late.all_ended = 107;
  CHECK(missed(victim_late) == Aspects{"in time"});
}

TEST_CASE("the judge reports a survivor that names nobody or another rank") {
  for (const char* const text : {"rank 0: over ranks [0, 1, 2]: a peer was lost: which one is not known",
                                 "rank 0: over ranks [0, 1, 2]: a peer was lost: rank 1 was killed by signal 9",
                                 "rank 0: waited in vain; ranks [0, 1] do not answer"}) {
    CAPTURE(text);
    Outcome outcome = as_promised();
    outcome.ranks[0].errors = {text};
    CHECK(missed(outcome) == Aspects{"named"});
    outcome.names_victim = false;
    CHECK(missed(outcome).empty());
  }
  Outcome silent = as_promised();
  silent.ranks[1].errors.clear();
  CHECK(missed(silent) == Aspects{"named"});
}

TEST_CASE("the judge reports a victim that does not say its own trouble, and a survivor that was not told of it") {
  Outcome outcome = as_promised();
  outcome.own_error = "No space left on device";
  for (auto& [rank, seen] : outcome.ranks) seen.errors = {"rank 2 failed in saving: No space left on device"};
  CHECK(missed(outcome).empty());
  for (const int64_t rank : {2, 1}) {
    Outcome silent = outcome;
    silent.ranks[rank].errors = {"rank 2 failed in saving: a peer was lost"};
    CHECK(missed(silent) == Aspects{"named"});
  }
  Outcome without_store = as_promised();
  without_store.own_error = outcome.own_error;
  without_store.ranks[2].errors = {"cannot open folder /tmp/store: No space left on device"};
  CHECK(missed(without_store).empty());
  without_store.ranks[2].errors = {"cannot make a file in the store's folder: No space left on device"};
  CHECK(missed(without_store) == Aspects{"named", "named"});
  without_store.makes_no_key = true;
  CHECK(missed(without_store).empty());
  without_store.ranks[2].errors = {"cannot open folder /tmp/store"};
  CHECK(missed(without_store) == Aspects{"named"});
}

TEST_CASE("the judge reports a state that is torn, lost, older than reported, or not the same on all ranks") {
  for (const std::string found : {"2 cc", "none", "checksum of block 0 differs", "nothing"}) {
    CAPTURE(found);
    Outcome outcome = as_promised();
    outcome.loaded = {found, found, found};
    CHECK(missed(outcome) == Aspects{"data whole"});
  }
  Outcome older = as_promised();
  older.newest_reported = 3;
  CHECK(missed(older) == Aspects{"data whole"});
  Outcome different = as_promised();
  different.loaded = {"2 bb", "2 bb", "1 aa"};
  CHECK(missed(different) == Aspects{"data whole"});
  Outcome none_yet = as_promised();
  none_yet.newest_reported = 0;
  none_yet.loaded = {"none", "none", "none"};
  CHECK(missed(none_yet).empty());
}

TEST_CASE("the judge reports what is left behind, and a job that fails without a fault") {
  Outcome outcome = as_promised();
  outcome.left = {"/dev/shm/x"};
  CHECK(missed(outcome) == Aspects{"nothing left"});
  Outcome without = as_promised();
  without.fault_time = std::nullopt;
  CHECK(missed(without) == Aspects{"in time", "in time", "in time"});
  Outcome stopped_shortly = as_promised();
  stopped_shortly.expected = Expected::kEndsWell;
  CHECK(missed(stopped_shortly) == Aspects{"in time", "in time", "in time"});
}

TEST_CASE("a process and a file that are left are found") {
  const PrivateFolder folder;
  const Before before({folder.path()});
  CHECK(before.left().empty());
  const pid_t child = tessera::start_child([] {
    ::pause();
    return 0;
  });
  std::ofstream(folder.path() + "/file") << "x";
  const std::vector<std::string> left = before.left();
  ::kill(child, SIGKILL);
  tessera::wait_for(child);
  REQUIRE(left.size() == 2);
  CHECK(left[0].starts_with("process " + std::to_string(child)));
  CHECK(left[1] == folder.path() + "/file");
}

TEST_CASE("a fault's text is read back") {
  const FaultPlan plan = {.rank = 1,
                          .fault = "error",
                          .point = "call",
                          .call = "pwrite",
                          .place = "states",
                          .count = 17,
                          .error = 28,
                          .lasting = true};
  CHECK(parse_fault_plan(to_string(plan)) == plan);
  CHECK_THROWS_WITH_AS(parse_fault_plan("when=now"), "a fault has no part 'when' (in 'when=now'); see to_string()",
                       std::invalid_argument);
}

TEST_CASE("a trial of every row holds what is promised") {
  if (tessera::testing::is_over_mpi() && !tessera::testing::why_no_mpi().empty()) {
    TESSERA_SKIP_MISSING(tessera::testing::why_no_mpi());
  }
  const PrivateFolder folder;
  const std::string backend = tessera::testing::is_over_mpi() ? "mpi" : "gloo";
  const std::string results = folder.path() + "/results";
  const auto outcome = tessera::testing::shell("tests/faults/campaign --trials 3 --backend " + backend + " --results " +
                                               results + " 2>&1");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  std::map<std::string, int> trials, faults;
  std::ifstream lines(results);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json trial = nlohmann::json::parse(line);
    ++trials[trial.at("row")];
    faults[trial.at("row")] += trial.at("fault_came").get<bool>() ? 1 : 0;
  }
  for (const Row& row : all_rows()) {
    CAPTURE(row.name);
    CHECK(trials[row.name] == ((backend == "mpi" ? row.mpi_trials : row.gloo_trials) > 0 ? 3 : 0));
    // Some system calls depend on time, so that a planned one may not come.
    if (row.name != "clean" && trials[row.name] > 0) CHECK(faults[row.name] > 0);
  }
}

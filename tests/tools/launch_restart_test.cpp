// tools/launch --restarts: all ranks start again after one has failed.

#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/tools/launching.h"
#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::PrivateFolder;
using tessera::testing::contains;
using tessera::testing::content_of;
using tessera::testing::launch;
using tessera::testing::LaunchOutcome;
using tessera::testing::start_launch;
using tessera::testing::wait_or_kill;
using tessera::testing::wait_until;

namespace {

LaunchOutcome launch_with(std::vector<std::string> options, const std::string& script) {
  for (const char* each : {"bash", "-c"}) options.emplace_back(each);
  options.push_back(script);
  return launch(options);
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace

TEST_CASE("launch --restarts: all ranks start again after each failure, and learn how often") {
  const LaunchOutcome outcome = launch_with(
      {"-n", "2", "--restarts", "3"},
      "echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS of $WORLD_SIZE; [ $TORCHELASTIC_RESTART_COUNT = 2 ] "
      "&& exit 0; [ $RANK = 1 ] && kill -9 $$; sleep 100");
  CHECK(outcome.exit_code == 0);
  CHECK(sorted_lines(outcome.out) == std::vector<std::string>{"[0] 0/3 of 2", "[0] 1/3 of 2", "[0] 2/3 of 2",
                                                              "[1] 0/3 of 2", "[1] 1/3 of 2", "[1] 2/3 of 2"});
  CHECK(outcome.err ==
        "launch: rank 1 was killed by signal 9; the other ranks were ended; restart 1 of 3 starts, with 2 ranks\n"
        "launch: rank 1 was killed by signal 9; the other ranks were ended; restart 2 of 3 starts, with 2 ranks\n");
}

TEST_CASE("launch --restarts: the exit code is the last attempt's") {
  const LaunchOutcome outcome = launch_with({"-n", "1", "--restarts", "2"}, "exit $((TORCHELASTIC_RESTART_COUNT + 5))");
  CHECK(outcome.exit_code == 7);
  CHECK(contains(outcome.err, "launch: rank 0 exited with code 6; restart 2 of 2 starts, with 1 rank\n"));
  CHECK(contains(outcome.err, "launch: rank 0 exited with code 7\n"));
}

TEST_CASE("launch: without --restarts nothing starts again, and ranks get no variables about it") {
  const LaunchOutcome outcome = launch_with({"-n", "1"}, "env | grep -c ELASTIC; exit 3");
  CHECK(outcome.exit_code == 3);
  CHECK(outcome.out == "[0] 0\n");
}

TEST_CASE("launch --restarts: each attempt has a store of its own, without the files of the one before") {
  const PrivateFolder folder;
  const LaunchOutcome outcome =
      launch_with({"-n", "2", "--restarts", "1"},
                  "echo $TESSERA_STORE $TORCHELASTIC_RUN_ID >>" + folder.path() +
                      "/seen; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && { ls -A $(dirname $TESSERA_STORE); exit 0; }; "
                      "touch $TESSERA_STORE; [ $RANK = 1 ] && exit 1; until [ -e $TESSERA_STORE.lost ]; do sleep 0.02; "
                      "done; exit 1");
  CHECK(outcome.exit_code == 0);
  // A rank may see that the other one has ended well already.
  CHECK_FALSE(contains(outcome.out, "store\n"));
  CHECK_FALSE(contains(outcome.out, "store.lost\n"));
  std::vector<std::string> seen = sorted_lines(content_of(folder.path() + "/seen"));
  REQUIRE(seen.size() == 4);
  CHECK(seen[0] == seen[1]);
  CHECK(seen[2] == seen[3]);
  CHECK(seen[1] != seen[2]);
  CHECK(seen[1].substr(seen[1].find(' ')) == seen[2].substr(seen[2].find(' ')));
  CHECK(seen[1].find(' ') + 10 < seen[1].size());
}

TEST_CASE("launch --min-ranks: each restart has one rank fewer, down to a number") {
  const LaunchOutcome outcome = launch_with({"-n", "4", "--restarts", "3", "--min-ranks", "2"},
                                            "[ $RANK = 0 ] && echo $WORLD_SIZE $LOCAL_WORLD_SIZE; exit 1");
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.out == "[0] 4 4\n[0] 3 3\n[0] 2 2\n[0] 2 2\n");
  CHECK(contains(outcome.err, "restart 3 of 3 starts, with 2 ranks\n"));
}

TEST_CASE("launch --restarts: a rank that is stopped for good counts as failed once the others give up") {
  const LaunchOutcome outcome =
      launch_with({"-n", "2", "--restarts", "1"},
                  "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && kill -STOP $$; sleep 1; exit 5");
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.err ==
        "launch: rank 0 exited with code 5; the other ranks were ended; restart 1 of 1 starts, with 2 ranks\n");
}

TEST_CASE("launch --restarts: a signal that asks to end is followed by no restart, and others are no reason to end") {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    CAPTURE(signal);
    const PrivateFolder folder;
    const pid_t pid = start_launch(
        {"-n", "2", "--restarts", "5", "bash", "-c",
         "trap 'exit 4' INT TERM HUP QUIT; trap 'exit 9' USR1; echo ready; while true; do sleep 0.02; done"},
        folder.path());
    const auto starts = [&] { return sorted_lines(content_of(folder.path() + "/out")).size(); };
    CHECK(wait_until([&] { return starts() == 2; }));
    ::kill(pid, SIGUSR1);
    CHECK(wait_until([&] { return starts() == 4; }));
    ::kill(pid, signal);
    CHECK(wait_or_kill(pid) == 4);
    CHECK(starts() == 4);
  }
}

TEST_CASE("launch --restarts: the time limit holds for all attempts together") {
  const LaunchOutcome outcome =
      launch_with({"-n", "1", "--restarts", "1000", "--time-limit", "2"}, "echo started; sleep 0.5; exit 1");
  CHECK((outcome.exit_code == 124 || outcome.exit_code == 1));  // 1: it passed between two attempts
  CHECK(outcome.seconds < 6);
  const auto attempts = static_cast<int64_t>(sorted_lines(outcome.out).size());
  CHECK(attempts >= 2);
  CHECK(attempts <= 5);
}

TEST_CASE("launch --restarts --backend mpi: each attempt is an MPI job of its own") {
  if (!tessera::has_mpirun()) TESSERA_SKIP_MISSING("no mpirun is in PATH");
  const LaunchOutcome outcome =
      launch_with({"-n", "3", "--restarts", "1", "--min-ranks", "1", "--backend", "mpi"},
                  "echo $OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_SIZE; [ $RANK = 2 ] && exit 1; exit 0");
  CHECK(outcome.exit_code == 0);
  CHECK(sorted_lines(outcome.out) == std::vector<std::string>{"[0] 0/2", "[0] 0/3", "[1] 1/2", "[1] 1/3", "[2] 2/3"});
}

TEST_CASE("launch --restarts: mistakes in its arguments are reported") {
  CHECK(contains(launch({"-n", "2", "--restarts", "-1", "true"}).err, "--restarts"));
  CHECK(contains(launch({"-n", "2", "--min-ranks", "1", "true"}).err, "--min-ranks requires --restarts"));
  const LaunchOutcome more = launch({"-n", "2", "--restarts", "1", "--min-ranks", "3", "true"});
  CHECK(more.exit_code == 1);
  CHECK(more.err == "launch: --min-ranks 3 is more than the 2 ranks of -n; give at most as many\n");
}

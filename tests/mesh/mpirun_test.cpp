// Runs a program under a user's mpirun: checks the backend that it gets, and how the job ends.

#include <filesystem>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/harness/over_mpi.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"

using tessera::testing::contains;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;
using tessera::testing::why_no_mpi;

namespace {

const std::string kProgram = "tests/mesh/failing_job ";

ShellOutcome under_mpirun(const std::string& what, const std::string& variables = "") {
  return shell(variables + " timeout 60 mpirun --allow-run-as-root --oversubscribe -np 2 " + kProgram + what);
}

}  // namespace

TEST_CASE("a job of mpirun goes over MPI, and over Gloo when that is asked for") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  CHECK(under_mpirun("'names its backend'").output == "mpi\nmpi\n");
  CHECK(under_mpirun("'names its backend'", "TESSERA_BACKEND=gloo").output == "gloo\ngloo\n");
  CHECK(under_mpirun("'names its backend'", "TESSERA_BACKEND=mpi").output == "mpi\nmpi\n");
}

TEST_CASE("a job of mpirun ends well, without a word of mpirun's") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  const ShellOutcome outcome = under_mpirun("'ends well'");
  CHECK(outcome.output.empty());
  CHECK(outcome.exit_code == 0);
}

TEST_CASE("a job of mpirun in which all ranks throw alike, and go on, ends well too") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  const ShellOutcome outcome = under_mpirun("'throws alike and goes on'");
  CHECK(outcome.output.empty());
  CHECK(outcome.exit_code == 0);
}

TEST_CASE("a rank that throws under mpirun leaves its text before mpirun ends the others") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  const ShellOutcome outcome = under_mpirun("'throws past main'");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code != 0);
  CHECK(outcome.exit_code != 124);
  CHECK(contains(outcome.output, "error: nobody catches this"));
}

TEST_CASE("a rank that is stopped at its end ends a job of mpirun when the limit is over, and is named") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  const ShellOutcome outcome = under_mpirun("'stops at its end' 0", "TESSERA_TIMEOUT=2");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(contains(outcome.output,
                 "MPI: rank 1 has come to its end, and MPI cannot be ended: timed out after 2000 ms, "
                 "waiting for ranks [0] to end too; a rank that does not come was stopped"));
}

TEST_CASE("MPI that was asked for and cannot be is refused by name") {
  const ShellOutcome outcome = shell(
      "TESSERA_BACKEND=mpi TESSERA_RANK=0 TESSERA_WORLD_SIZE=2 TESSERA_STORE=/dev/null " + kProgram + "'ends well'");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code != 0);
  CHECK(contains(outcome.output, "TESSERA_BACKEND=mpi, but no MPI started this process as rank 0 of 2"));
  CHECK(contains(outcome.output, "start it with mpirun or tools/launch --backend mpi"));
  // These are places as mpirun gives them: a build with MPI would go on and wait for the other rank.
  if (!contains(why_no_mpi(), "this build has no MPI")) return;
  const ShellOutcome without =
      shell("TESSERA_BACKEND=mpi OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 TESSERA_STORE=/dev/null " + kProgram +
            "'ends well'");
  CHECK(contains(without.output, "TESSERA_BACKEND=mpi, and this build has no MPI; install libopenmpi-dev"));
}

TEST_CASE("launch --backend mpi makes the ranks processes of one MPI job, and ends them as others") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  const std::string launch = "timeout 60 tools/launcher/launch -n 2 --backend mpi ";
  const ShellOutcome backend = shell(launch + kProgram + "'names its backend'");
  CHECK((backend.output == "[0] mpi\n[1] mpi\n" || backend.output == "[1] mpi\n[0] mpi\n"));
  const ShellOutcome places = shell(launch + "sh -c 'echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE is $RANK'");
  CHECK(contains(places.output, "[1] 1 of 2 is 1\n"));
  CHECK(shell(launch + "sh -c 'exit $(($RANK * 7))'").exit_code == 7);
  CHECK(shell(launch + "sh -c 'kill -9 $$'").exit_code == 128 + 9);
  const ShellOutcome thrown = shell(launch + kProgram + "throws");
  CAPTURE(thrown.output);
  CHECK(contains(thrown.output,
                 "[0] error: rank 0, aten::mm: all_reduce on mesh dimension tp of {tp: 2} on cpu over ranks"));
  CHECK(contains(thrown.output, "rank 1 failed in the user's callback at {tp: 2}: index 7 is out of range"));
}

TEST_CASE("launch --backend mpi leaves no shared memory behind, also of a rank that is killed") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  const std::string show = "sh -c 'echo $OMPI_MCA_btl_vader_backing_directory; exec " + kProgram + "\"is killed\"'";
  const ShellOutcome outcome = shell("timeout 60 tools/launcher/launch --no-prefix -n 2 --backend mpi " + show);
  const std::string folder = outcome.output.substr(0, outcome.output.find('\n'));
  CAPTURE(outcome.output);
  CHECK(folder.starts_with("/dev/shm/tessera-"));
  CHECK_FALSE(std::filesystem::exists(folder));
  CHECK(outcome.exit_code == 128 + 9);
}

TEST_CASE("launch --backend mpi says what is wrong with mpirun") {
  const std::string launch = "tools/launcher/launch -n 2 --backend mpi true";
  const ShellOutcome missing = shell("PATH=/nowhere " + launch);
  CHECK(missing.exit_code == 1);
  CHECK(contains(missing.output,
                 "launch: mpirun has ended: it has started 0 of 2 places for ranks; ranks over MPI need Open MPI's"));
  CHECK(contains(missing.output, "cannot start mpirun: No such file or directory"));
  const ShellOutcome unknown = shell("tools/launcher/launch -n 2 --backend smoke true");
  CHECK(unknown.exit_code != 0);
  CHECK(contains(unknown.output, "smoke not in {gloo,mpi}"));
}

// Has two jobs use one store by mistake.
#include <chrono>
#include <string>
#include <thread>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/mesh/failing_jobs.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("two jobs on one store: the second one ends with an error, and so does the first") {
  if (is_over_mpi()) TESSERA_SKIP("the store is the same over MPI");
  const PrivateFolder folder;
  Job first;
  std::thread running([&] { first = run_job("ends late", 2, {}, {.victim = {}, .folder = folder.path()}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  // Calls from several threads run one after the other, so the second job starts by itself.
  const ShellOutcome second = shell("TESSERA_RANK=0 TESSERA_WORLD_SIZE=2 TESSERA_STORE=" + folder.path() +
                                    "/store tests/mesh/failing_job 'ends well' 2>&1");
  running.join();
  CHECK(second.exit_code != 0);
  CAPTURE(second.output);
  const std::string taken = "rank 0 of this store has been taken by process ";
  CHECK(second.output.find(taken) != std::string::npos);
  const std::string all = first.all();
  CAPTURE(all);
  CHECK_FALSE(first.result.ok());
  for (const int64_t rank : {0, 1}) {
    REQUIRE_FALSE(first.starting_with(rank, "error: ").empty());
    CHECK(first.starting_with(rank, "error: ")[0].text.find(taken) != std::string::npos);
  }
}

TEST_CASE("a job that has run for longer than a second one would wait for its ranks goes on") {
  if (is_over_mpi()) TESSERA_SKIP("the store is the same over MPI");
  const PrivateFolder folder;
  Job first;
  std::thread running([&] { first = run_job("ends very late", 2, {}, {.victim = {}, .folder = folder.path()}); });
  const ShellOutcome second = shell(fmt::format(
      "for i in $(seq 300); do [ \"$(ls {0}/store 2> /dev/null | grep -c 'process%2f[01]@1$')\" = 2 ] && break; "
      "sleep 0.05; done; sleep 1.5; TESSERA_RANK=0 TESSERA_WORLD_SIZE=2 TESSERA_TIMEOUT=1 TESSERA_STORE={0}/store "
      "tests/mesh/failing_job 'ends well' 2>&1",
      folder.path()));
  running.join();
  CAPTURE(second.output);
  CHECK(second.exit_code != 0);
  CHECK(second.output.find("rank 0 of this store has been taken by process ") != std::string::npos);
  const std::string all = first.all();
  CAPTURE(all);
  CHECK(first.result.ok());
}

TEST_CASE("two jobs come to one store at once: ranks of both do not make one job, and all end") {
  if (is_over_mpi()) TESSERA_SKIP("the store is the same over MPI");
  const PrivateFolder folder;
  const auto start = [&](const std::string& job, int64_t rank, const std::string& how) {
    return fmt::format(
        "TESSERA_RANK={} TESSERA_WORLD_SIZE=2 TESSERA_TIMEOUT=20 TESSERA_STORE={}/store tests/mesh/failing_job '{}' "
        "> {}/{}{} 2>&1 || echo {}{} failed",
        rank, folder.path(), how, folder.path(), job, rank, job, rank);
  };
  // Rank 0 of one job and rank 1 of the other one have joined when the other two come.
  const std::string joined = fmt::format("ls {}/store 2> /dev/null | grep -c 'process%2f[01]@1$'", folder.path());
  const ShellOutcome out = shell(
      fmt::format("({}) & ({}) & for i in $(seq 300); do [ \"$({})\" = 2 ] && break; sleep 0.05; done; ({}) & ({}) & "
                  "wait; cat {}/[AB][01]",
                  start("A", 0, "ends well after a while"), start("B", 1, "ends well after a while"), joined,
                  start("A", 1, "ends well"), start("B", 0, "ends well"), folder.path()));
  CAPTURE(out.output);
  for (const std::string who : {"A0", "A1", "B0", "B1"}) {
    CAPTURE(who);
    CHECK(out.output.find(who + " failed") != std::string::npos);
  }
  CHECK(out.output.find("so two jobs use one store") != std::string::npos);
}

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include "tessera/inspect/parting.h"
#include "tessera/mesh/record_file.h"
#include "tessera/tests/harness/sanitizers.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/small_disk.h"
#include "tessera/tests/mesh/failing_jobs.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera;
using namespace tessera::testing;
using Clock = std::chrono::steady_clock;

namespace {

// UBSan asks a pipe whether it may read an object's type, and takes the object for one of another type without it.
#define TESSERA_SKIP_WHERE_CHECKS_NEED_DESCRIPTORS() \
  if (kUndefinedBehaviorSanitizer) TESSERA_SKIP("the checks of UBSan need a file descriptor, and none is left here")

const std::string kThrown = "failed in the user's callback at {tp: 2}: index 7 is out of range";
const std::string kWhere = "aten::mm: all_reduce on mesh dimension tp of {tp: 3} on cpu over ranks [0, 1, 2]";

}  // namespace

TEST_CASE("a job in which nothing fails ends well, however often") {
  TESSERA_SKIP_WITHOUT_MPI();
  for (int i = 0; i < 5; ++i) CHECK(run_job("ends well", 3).result.ok());
  CHECK(run_job("ends well", 2, tcp_store()).result.ok());
}

TEST_CASE("a process that a rank forks is told that it may not communicate, and the job goes on") {
  TESSERA_SKIP_WITHOUT_MPI();
  const Job job = run_job("ends well with a child", 3);
  INFO(job.all());
  CHECK(job.result.ok());
  for (const int64_t rank : {0, 1, 2}) {
    const std::vector<Line> told = job.starting_with(rank, "child: ");
    REQUIRE(told.size() == 1);
    CHECK(told[0].text.find(fmt::format("rank {} has forked this process", rank)) != std::string::npos);
  }
}

// Open MPI 4.1 writes a longer message beyond the memory that waits for it, if it is large enough to be copied at once.
TEST_CASE("over MPI ranks that call different collectives are told so, and nobody is said to be lost") {
  if (!is_over_mpi()) TESSERA_SKIP("Gloo may end a process that gets too many bytes");
  TESSERA_SKIP_WITHOUT_MPI();
  const Job job = run_job("sends another size", 3, {{"TESSERA_CHECKED", "0"}});
  check_others_ended(job, 3, {"the ranks called different collectives, or with other sizes"});
  CHECK(job.all().find("a peer was lost") == std::string::npos);
}

TEST_CASE("a rank throws in a user's callback: those that wait for it get its text") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("throws", 3), 3, {kWhere, "rank 2 " + kThrown});
  check_others_ended(run_job("throws", 3, tcp_store()), 3, {kWhere, "rank 2 " + kThrown});
}

TEST_CASE("a rank throws while the others compute: their next collective throws its text") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("throws while others compute", 3), 3, {"rank 2 " + kThrown});
}

TEST_CASE("a rank throws while a collective that it has started is not done: it does not wait for its limit") {
  TESSERA_SKIP_WITHOUT_MPI();
  // Checked would refuse the collective, which the others do not run.
  const Job job = run_job("throws with a collective begun", 3, {{"TESSERA_CHECKED", "0"}});
  check_others_ended(job, 3, {"rank 2 " + kThrown});
  const std::vector<Line> over = job.starting_with(2, "is over");
  REQUIRE(over.size() == 1);
  CHECK(std::chrono::duration<double>(over[0].time - job.starting_with(2, "fault").at(0).time).count() < 5);
}

TEST_CASE("a rank throws before a group is made: those that make it do not wait") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("throws before the groups are made", 3), 3,
                     {"making a process group over ranks [0, 1, 2]", "rank 2 " + kThrown});
}

TEST_CASE("a rank throws before the others join: they get its text, though it would be the last to have the store") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("throws before the others join", 3), 3,
                     {"making a process group over ranks [0, 1, 2]", "rank 2 " + kThrown});
}

TEST_CASE("a rank throws: ranks that share no group with it end too, also while they wait for a busy one") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("throws on a grid", 4), 4, {"rank 3 " + kThrown});
}

TEST_CASE("a rank is killed: the others name it and the operator that they were in") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("is killed", 3), 3, {kWhere, "a peer was lost: rank 2 was killed by signal 9"});
  check_others_ended(run_job("is killed before the groups are made", 3), 3,
                     {"a peer was lost: rank 2 was killed by signal 9"});
}

TEST_CASE("a rank exits: the others name it") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("exits with 3", 3), 3, {kWhere, "a peer was lost: rank 2 exited with code 3"});
  // A launcher sees no failure here.
  check_others_ended(run_job("exits with 0", 3), 3, {kWhere, "a peer was lost: the process of rank 2 has ended"});
  check_others_ended(run_job("exits with 0 before the groups are made", 3), 3,
                     {"a peer was lost: the process of rank 2 has ended"});
}

TEST_CASE("a rank exits before it joins: the others do not wait for it") {
  TESSERA_SKIP_WITHOUT_MPI();
  const std::string lost = "a peer was lost: rank 2 exited with code 0 before it joined the others";
  const Job job = run_job("exits with 0 before it joins", 3);
  if (!is_over_mpi()) return check_others_ended(job, 3, {"making a process group over ranks [0, 1, 2]", lost});
  // MPI starts with the world, which then cannot be made.
  const std::string all = job.all();
  INFO(all);
  CHECK_FALSE(job.result.timed_out);
  for (const int64_t rank : {0, 1}) {
    const std::vector<Line> errors = job.starting_with(rank, "error: ");
    REQUIRE(errors.size() == 1);
    CHECK(errors[0].text.find("starting MPI over ranks [0, 1, 2]: " + lost) != std::string::npos);
    CHECK(std::chrono::duration<double>(errors[0].time - job.starting_with(2, "fault").at(0).time).count() < 5);
  }
}

TEST_CASE("a rank throws when the others are done: they end in order, and do not wait for their limit") {
  TESSERA_SKIP_WITHOUT_MPI();
  const Job job = run_job("throws to main when the others are done", 3);
  const std::string all = job.all();
  INFO(all);
  CHECK_FALSE(job.result.timed_out);
  REQUIRE(job.result.failure.has_value());
  CHECK(job.result.failure->exit_code == 1);
  for (const int64_t rank : {0, 1}) {
    CAPTURE(rank);
    CHECK(job.ended.contains(rank));
    CHECK(job.starting_with(rank, "MPI: ").empty());
  }
}

TEST_CASE("all ranks throw alike: the job has not failed, and goes on with other Worlds") {
  TESSERA_SKIP_WITHOUT_MPI();
  const PrivateFolder records;
  const Job job = run_job("throws alike and goes on", 3, {{"TESSERA_RECORDS", records.path()}});
  const std::string all = job.all();
  CAPTURE(all);
  CHECK(job.result.ok());
  CHECK(std::filesystem::is_empty(records.path()));
}

TEST_CASE("a rank comes to its end while others wait for it: they learn of it before their limit") {
  TESSERA_SKIP_WITHOUT_MPI();
  const std::string lost =
      std::string("a peer was lost: ") + (is_over_mpi() ? "MPI: ranks [2] have come to their end" : "");
  // Over MPI the rank itself may wait for the others until the limit.
  for (const char* how : {"returns from main", "calls exit", "throws to main"}) {
    CAPTURE(how);
    check_others_ended(run_job(how, 3, {{"TESSERA_TIMEOUT", "8"}}), 3, {kWhere, lost});
  }
}

TEST_CASE("an exception that leaves main still leaves its text") {
  TESSERA_SKIP_WITHOUT_MPI();
  check_others_ended(run_job("throws past main", 3), 3, {kWhere, "rank 2 failed in main: nobody catches this"});
}

TEST_CASE("only the source sees a wrong tensor to scatter: the others get its text") {
  TESSERA_SKIP_WITHOUT_MPI();
  const Job job = run_job("scatters a wrong shape", 3);
  check_others_ended(
      job, 3, {"rank 2 failed in scatter: scatter: the source's input of shape (7) must be 3 rows of shape (2)"});
  CHECK(job.starting_with(2, "own error: scatter: the source's input").size() == 1);
}

TEST_CASE("a rank that has done its part and left is not blamed for one that does not come or ends") {
  if (!is_over_mpi()) TESSERA_SKIP("over Gloo every rank has a part in every exchange");
  TESSERA_SKIP_WITHOUT_MPI();
  const std::string lost = "a peer was lost: the process of rank ";
  // Under Checked every rank takes part in every exchange, so none would have left.
  const Job late =
      run_job("does not come, and another has left", 3, {{"TESSERA_TIMEOUT", "2"}, {"TESSERA_CHECKED", "0"}});
  const std::string late_text = late.all();
  INFO(late_text);
  REQUIRE_FALSE(late.starting_with(1, "error: ").empty());
  CHECK(late.starting_with(1, "error: ")[0].text.find("rank 1 waited in vain in permute") != std::string::npos);
  CHECK(late_text.find(lost) == std::string::npos);
  const Job ended = run_job("exits with 0, and another has left", 3, {{"TESSERA_CHECKED", "0"}});
  const std::string ended_text = ended.all();
  INFO(ended_text);
  REQUIRE_FALSE(ended.starting_with(1, "error: ").empty());
  CHECK(ended.starting_with(1, "error: ")[0].text.find(lost + "2 has ended") != std::string::npos);
  CHECK(ended_text.find(lost + "0 has ended") == std::string::npos);
}

TEST_CASE("a rank that does not come: the others name it when the time limit is over") {
  TESSERA_SKIP_WITHOUT_MPI();
  const PrivateFolder folder;
  const Job job = run_job("does not come", 3, {{"TESSERA_TIMEOUT", "2"}, {"TESSERA_RECORDS", folder.path()}});
  check_others_ended(job, 3, {kWhere, "waited in vain in aten::mm: all_reduce on mesh dimension tp"});
  for (const int64_t rank : {0, 1}) {
    const std::string said = job.starting_with(rank, "error: ").at(0).text;
    CAPTURE(said);
    CHECK(said.find("; ranks [2] did not come to it") != std::string::npos);
  }
  // The one that does not come writes its records too, by the thread that watches for a failure.
  const std::vector<RankRecords> records = read_all_records(folder.path());
  REQUIRE(records.size() == 3);
  CHECK(records[2].failure.find("rank 2: the job has failed: rank ") != std::string::npos);
  const std::string text = where_ranks_part(records);
  CAPTURE(text);
  CHECK(text.find("  rank 2 did not come to it") != std::string::npos);
}

TEST_CASE("rank 0 dies, which serves the store: the others name it") {
  TESSERA_SKIP_WITHOUT_MPI();
  const std::string lost = "a peer was lost: rank 0 was killed by signal 9";
  check_others_ended(run_job("is killed", 3, {}, {.victim = "0"}), 3, {kWhere, lost}, 0);
  const std::string ended = "a peer was lost: the process of rank 0 has ended";
  check_others_ended(run_job("is killed", 3, tcp_store(), {.victim = "0"}), 3, {kWhere, ended}, 0);
}

TEST_CASE("a rank is stopped: the others end within their limit and two seconds, and name it") {
  TESSERA_SKIP_WITHOUT_MPI();
  for (const std::string victim : {"0", "2"}) {
    for (const bool over_tcp : {false, true}) {
      CAPTURE(victim);
      CAPTURE(over_tcp);
      std::map<std::string, std::string> environment = {{"TESSERA_TIMEOUT", "3"}};
      if (over_tcp) environment.merge(tcp_store());
      const Job job = run_job("is stopped", 3, environment, {.victim = victim});
      // The victim's store does not answer either.
      const bool gone = over_tcp && victim == "0";
      check_others_ended(job, 3, {kWhere, "waited in vain in aten::mm: all_reduce on mesh dimension tp"},
                         std::stoll(victim), 5);
      for (int64_t rank = 0; rank < 3; ++rank) {
        if (std::to_string(rank) == victim) continue;
        const std::string said = job.starting_with(rank, "error: ").at(0).text;
        CAPTURE(said);
        CHECK(said.find(gone ? "; rank 0, which serves the store, does not answer"
                             : fmt::format("; ranks [{}] do not answer", victim)) != std::string::npos);
      }
      // Whichever rank ends first, with its World, store and groups.
      Clock::time_point first = Clock::time_point::max();
      for (int64_t rank = 0; rank < 3; ++rank) {
        if (std::to_string(rank) != victim) first = std::min(first, job.ended.at(rank));
      }
      CHECK(std::chrono::duration<double>(first - job.starting_with(std::stoll(victim), "fault").at(0).time).count() <
            6);
    }
  }
}

TEST_CASE("a rank is stopped before it makes the groups: the others end within their limit and two seconds") {
  TESSERA_SKIP_WITHOUT_MPI();
  for (const std::string victim : {"0", "2"}) {
    CAPTURE(victim);
    std::map<std::string, std::string> environment = {{"TESSERA_TIMEOUT", "3"}};
    environment.merge(tcp_store());
    const Job job = run_job("is stopped before the groups are made", 3, environment, {.victim = victim});
    check_others_ended(job, 3, {"making a process group over ranks [0, 1, 2]", "waited in vain"}, std::stoll(victim),
                       5);
  }
}

TEST_CASE("rank 0 is stopped, which serves the store, before the others join: they end within their limit") {
  if (is_over_mpi()) TESSERA_SKIP("the store is the same over MPI");
  std::map<std::string, std::string> environment = {{"TESSERA_TIMEOUT", "3"}};
  environment.merge(tcp_store());
  const Job job = run_job("is stopped before the others join", 3, environment, {.victim = "0"});
  const std::string all = job.all();
  INFO(all);
  for (const int64_t rank : {1, 2}) {
    const std::vector<Line> errors = job.starting_with(rank, "error: ");
    REQUIRE(errors.size() == 1);
    CHECK(errors[0].text.find("cannot be reached: ") != std::string::npos);
    // They come 1.5 seconds after the fault.
    CHECK(std::chrono::duration<double>(errors[0].time - job.starting_with(0, "fault").at(0).time).count() < 1.5 + 5);
  }
}

TEST_CASE("a rank is stopped at its end: the others leave within their limit and two seconds, with an error") {
  if (!is_over_mpi()) TESSERA_SKIP("over Gloo no rank waits for others at its end");
  TESSERA_SKIP_WITHOUT_MPI();
  struct Row {
    std::string how;
    std::string text;
  };
  const std::vector<Row> rows = {
      {"stops at its end", "MPI cannot be ended: timed out after 2000 ms, waiting for ranks [2] to end too; a rank"},
      {"stops in MPI_Finalize", "MPI cannot be ended: MPI_Finalize timed out after "}};
  for (const Row& row : rows) {
    CAPTURE(row.how);
    const Job job = run_job(row.how, 3, {{"TESSERA_TIMEOUT", "2"}});
    const std::string all = job.all();
    INFO(all);
    CHECK_FALSE(job.result.timed_out);
    REQUIRE(job.result.failure.has_value());
    CHECK(job.result.failure->exit_code == 1);
    for (const int64_t rank : {0, 1}) {
      CAPTURE(rank);
      const std::vector<Line> errors =
          job.starting_with(rank, fmt::format("MPI: rank {} has come to its end, and ", rank));
      REQUIRE(errors.size() == 1);
      CHECK(errors[0].text.find(row.text) != std::string::npos);
      CHECK(job.starting_with(rank, "last words").size() == 1);
      const Clock::time_point fault = job.starting_with(2, "fault").at(0).time;
      CHECK(std::chrono::duration<double>(errors[0].time - fault).count() < 4);
      REQUIRE(job.ended.contains(rank));
      CHECK(std::chrono::duration<double>(job.ended.at(rank) - fault).count() < 5);
    }
  }
}

TEST_CASE("the limit holds for the whole start of MPI, also where a rank comes late and MPI does not start") {
  if (!is_over_mpi()) TESSERA_SKIP("over Gloo there is no MPI to start");
  TESSERA_SKIP_WITHOUT_MPI();
  const Job job = run_job("comes late and does not start MPI", 2, {{"TESSERA_TIMEOUT", "3"}});
  const std::string all = job.all();
  INFO(all);
  const std::vector<Line> errors = job.starting_with(0, "error: ");
  REQUIRE(errors.size() == 1);
  CHECK(errors[0].text.find("starting MPI over ranks [0, 1]") != std::string::npos);
  CHECK(errors[0].text.find("MPI_Init_thread (the ranks met after ") != std::string::npos);
  const double seconds =
      std::chrono::duration<double>(errors[0].time - job.starting_with(0, "fault").at(0).time).count();
  CHECK(seconds > 2.9);
  CHECK(seconds < 5);
}

TEST_CASE("a rank is stopped for less than the limit: the job goes on") {
  TESSERA_SKIP_WITHOUT_MPI();
  for (const std::string victim : {"0", "2"}) {
    const Job job = run_job("stops for a while", 3, tcp_store(), {.victim = victim});
    const std::string all = job.all();
    CAPTURE(all);
    CHECK(job.result.ok());
  }
}

TEST_CASE("a rank lacks descriptors for a new group: this is its own error, and the others get its text") {
  if (is_over_mpi()) TESSERA_SKIP("over MPI a group needs no descriptor");
  TESSERA_SKIP_WHERE_CHECKS_NEED_DESCRIPTORS();
  const Job job = run_job("lacks descriptors before the groups are made", 3);
  check_others_ended(job, 3, {"rank 2 failed in aten::mm: making a process group: ", "Too many open files"});
  const std::string said = job.starting_with(2, "own error: ").at(0).text;
  CAPTURE(said);
  CHECK(said.find("Too many open files") != std::string::npos);
  CHECK(job.all().find("a peer was lost") == std::string::npos);
}

TEST_CASE("a rank is killed while another one lacks descriptors: both others name the one that was killed") {
  TESSERA_SKIP_WITHOUT_MPI();
  TESSERA_SKIP_WHERE_CHECKS_NEED_DESCRIPTORS();
  const PrivateFolder records;
  const std::string lost = "a peer was lost: rank 0 was killed by signal 9";
  const Job job =
      run_job("is killed while another lacks descriptors", 3, {{"TESSERA_RECORDS", records.path()}}, {.victim = "0"});
  check_others_ended(job, 3, {kWhere, lost}, 0);
  // The one that lacks descriptors writes its records all the same.
  CHECK(read_all_records(records.path()).size() == 2);
}

TEST_CASE("a rank throws on a full disk: the others get its text all the same") {
  TESSERA_SKIP_WITHOUT_MPI();
  const SmallDisk disk;
  if (!disk.why_not().empty()) TESSERA_SKIP_MISSING(disk.why_not());
  check_others_ended(run_job("throws on a full disk", 3, {}, {.victim = {}, .folder = disk.path()}), 3,
                     {kWhere, "rank 2 " + kThrown});
}

TEST_CASE("a rank fills the disk and is killed: the others learn from the launcher how it ended") {
  TESSERA_SKIP_WITHOUT_MPI();
  const SmallDisk disk;
  if (!disk.why_not().empty()) TESSERA_SKIP_MISSING(disk.why_not());
  check_others_ended(run_job("is killed on a full disk", 3, {}, {.victim = {}, .folder = disk.path()}), 3,
                     {kWhere, "a peer was lost: rank 2 was killed by signal 9"});
}

TEST_CASE("when a job fails, every rank that is alive writes its records, which say where the ranks part") {
  TESSERA_SKIP_WITHOUT_MPI();
  const PrivateFolder folder;
  run_job("throws", 3, {{"TESSERA_RECORDS", folder.path()}});
  const std::vector<RankRecords> thrown = read_all_records(folder.path());
  REQUIRE(thrown.size() == 3);
  for (const RankRecords& one : thrown) CHECK(one.failure.find(kThrown) != std::string::npos);
  for (const std::size_t rank : {0, 1}) CHECK(thrown[rank].failure.find(kWhere) != std::string::npos);
  const std::string text = where_ranks_part(thrown);
  CAPTURE(text);
  CHECK(text.starts_with("The ranks first part in collective 2 on mesh dimension tp of ranks 0, 1, 2:\n"));
  CHECK(text.find("  rank 2 did not come to it") != std::string::npos);
  const PrivateFolder other;
  run_job("is killed", 3, {{"TESSERA_RECORDS", other.path()}}, {.victim = "0"});
  const std::string killed = where_ranks_part(read_all_records(other.path()));
  CAPTURE(killed);
  CHECK(killed.find("There are no records of ranks 0.") != std::string::npos);
}

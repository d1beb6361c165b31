#include "tessera/inspect/parting.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "tessera/mesh/record_file.h"
#include "tessera/tests/harness/refused.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera;
using tessera::testing::check_refused;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;
namespace fs = std::filesystem;

namespace {

Record collective(int64_t serial, const char* name, const char* path = "up.weight", const char* mesh_dim = "tp",
                  const std::vector<int64_t>& ranks = {0, 1}) {
  return {.rank = 0,
          .sequence = static_cast<uint64_t>(serial),
          .kind = RecordKind::kCollective,
          .name = name,
          .path = path,
          .begin_ns = 1000 * serial,
          .end_ns = 1000 * serial + 500,
          .op = "aten::mm",
          .mesh_dim = mesh_dim,
          .ranks = ranks,
          .serial = serial,
          .bytes = 64};
}

RankRecords rank(int64_t number, std::vector<Record> records, const char* failure = "failed") {
  for (Record& each : records) each.rank = number;
  return {.rank = number, .failure = failure, .records = std::move(records)};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Returns the first `count` collectives of one rank of {dp: 2, tp: 2}, by a clock that is `ahead_ns` too fast. If the
// rank waits, the last one has not ended.
std::vector<Record> on_grid(int64_t number, std::size_t count, bool waits, int64_t ahead_ns) {
  const std::vector<int64_t> tp = {number / 2 * 2, number / 2 * 2 + 1}, dp = {number % 2, number % 2 + 2};
  const std::vector<std::string> program = {"tp", "tp", "dp", "tp", "tp", "dp", "tp", "dp"};
  std::map<std::string, int64_t> serials;
  std::vector<Record> records;
  for (std::size_t i = 0; i < count; ++i) {
    const char* const mesh_dim = program[i].c_str();
    Record here = collective(++serials[program[i]], "all_reduce", "", mesh_dim, program[i] == "tp" ? tp : dp);
    here.sequence = i + 1;
    here.begin_ns = ahead_ns + 1000 * static_cast<int64_t>(i + 1);
    here.end_ns = here.begin_ns + 500;
    records.push_back(here);
  }
  if (waits) {
    records.back().end_ns = 0;
    records.back().waited_from_ns = records.back().begin_ns + 1;
  }
  return records;
}

}  // namespace

TEST_CASE("ranks that began different collectives part at the first of them") {
  const std::string text = where_ranks_part({
      rank(0, {collective(1, "all_reduce"), collective(2, "all_reduce"), collective(3, "all_gather")}),
      rank(1, {collective(1, "all_reduce"), collective(2, "all_gather"), collective(3, "all_reduce")}),
  });
  CAPTURE(text);
  CHECK(has(text,
            "The ranks first part in collective 2 on mesh dimension tp of ranks 0, 1:\n  rank 0: #2 all_reduce of "
            "aten::mm (up.weight)"));
  CHECK(has(text, "  rank 1: #2 all_gather"));
}

TEST_CASE("a rank that does not come, and one without records, are named; open records are listed") {
  Record open = collective(2, "all_reduce", "down.weight", "tp", {0, 1, 2});
  open.end_ns = 0;
  const std::vector<Record> first = {collective(1, "all_reduce", "", "tp", {0, 1, 2})};
  const std::string text = where_ranks_part({rank(0, {first[0], open}), rank(1, first, "index 7 is out of range")});
  CAPTURE(text);
  CHECK(has(text,
            "in collective 2 on mesh dimension tp of ranks 0, 1, 2:\n  rank 0: #2 all_reduce of aten::mm "
            "(down.weight)"));
  CHECK(has(text, "  rank 1 did not come to it\n"));
  CHECK(has(text, "There are no records of ranks 2.\n"));
  CHECK(has(text, "rank 1, 1 records: index 7 is out of range\n    the last that it did: #1 all_reduce"));
  CHECK(has(text, "    had not ended: #2 all_reduce"));
}

TEST_CASE("the earliest parting of several groups is shown, and what a ring has lost is left out") {
  const std::string text = where_ranks_part({
      rank(0, {collective(5, "all_reduce", "a", "dp"), collective(7, "all_reduce"), collective(8, "barrier")}),
      rank(1, {collective(5, "all_gather", "a", "dp"), collective(6, "broadcast"), collective(7, "all_reduce"),
               collective(8, "scatter")}),
  });
  CAPTURE(text);
  CHECK(has(text, "in collective 5 on mesh dimension dp"));
  CHECK(where_ranks_part(
            {rank(0, {collective(7, "all_reduce")}), rank(1, {collective(6, "x"), collective(7, "all_reduce")})})
            .starts_with("All ranks have begun the same collectives.\n"));
}

TEST_CASE("a rank whose ring has lost all its records of a group counts as having come to these collectives") {
  RankRecords other = rank(1, {collective(90, "barrier", "", "dp")});
  other.counts = {{.mesh_dim = "tp", .ranks = {0, 1}, .count = 6}};
  const RankRecords both =
      rank(0, {collective(5, "all_reduce"), collective(6, "all_reduce"), collective(90, "barrier", "", "dp")});
  const std::string same = where_ranks_part({both, other});
  CAPTURE(same);
  CHECK(same.starts_with("All ranks have begun the same collectives.\n"));
  RankRecords more = both;
  more.records.push_back(collective(7, "all_gather"));
  const std::string text = where_ranks_part({more, other});
  CAPTURE(text);
  CHECK(has(text, "in collective 7 on mesh dimension tp of ranks 0, 1:\n  rank 0: #7 all_gather"));
  CHECK(has(text, "  rank 1 did not come to it\n"));
  // A file of an earlier version does not say how many there were.
  other.counts.clear();
  CHECK(has(where_ranks_part({both, other}), "in collective 5 on mesh dimension tp"));
}

TEST_CASE("on a grid the parting is shown that the others follow from, also where clocks say otherwise") {
  constexpr int64_t kHour = 3600000000000;
  for (const int64_t ahead : {-kHour, int64_t{0}, kHour}) {  // of the host of ranks 2 and 3
    CAPTURE(ahead);
    const RankRecords zero = rank(0, on_grid(0, 7, true, kHour));
    const RankRecords two = rank(2, on_grid(2, 8, true, kHour + ahead));
    const RankRecords three = rank(3, on_grid(3, 8, true, kHour + ahead));
    const std::string head =
        "The ranks first part in collective 5 on mesh dimension tp of ranks 0, 1:\n  rank 0: #7 all_reduce";
    // Rank 1 was killed before its seventh collective.
    const std::string killed = where_ranks_part({zero, two, three});
    CAPTURE(killed);
    CHECK(killed.starts_with(head));
    CHECK(has(killed, "\n  rank 1 has no records\nThere are no records of ranks 1.\n"));
    // Rank 1 is busy in its own code.
    const std::string busy = where_ranks_part({zero, rank(1, on_grid(1, 6, false, kHour)), two, three});
    CAPTURE(busy);
    CHECK(busy.starts_with(head));
    CHECK(has(busy, "\n  rank 1 did not come to it\nrank 0, 7 records: failed\n"));
  }
}

TEST_CASE("a collective that nobody waits for yet does not say that its rank waits in it") {
  std::vector<Record> busy = on_grid(1, 6, false, 0);
  busy[5].end_ns = 0;  // it is pending, and the rank has gone on
  busy.push_back({.sequence = 7, .kind = RecordKind::kSpan, .name = "compute", .begin_ns = 7000});
  const std::string text = where_ranks_part({rank(0, on_grid(0, 7, true, 0)), rank(1, busy),
                                             rank(2, on_grid(2, 8, true, 0)), rank(3, on_grid(3, 8, true, 0))});
  CAPTURE(text);
  CHECK(text.starts_with("The ranks first part in collective 5 on mesh dimension tp of ranks 0, 1:\n"));
  CHECK(has(text, "  rank 1 did not come to it\n"));
}

TEST_CASE("ranks that began different collectives have parted, whatever others wait for") {
  const std::vector<Record> alike = {collective(1, "all_reduce", "", "tp", {2, 3})};
  Record open = collective(1, "all_reduce", "", "dp", {0, 2});
  open.sequence = 2;
  open.begin_ns = 2000;
  open.end_ns = 0;
  const std::string text =
      where_ranks_part({rank(0, {collective(1, "all_reduce")}), rank(1, {collective(1, "all_gather")}),
                        rank(2, {alike.front(), open}), rank(3, alike)});
  CAPTURE(text);
  CHECK(has(text, "in collective 1 on mesh dimension tp of ranks 0, 1:\n"));
}

TEST_CASE("where ranks wait for each other in a circle, the earliest parting is shown") {
  const auto waits = [](const char* mesh_dim, const std::vector<int64_t>& ranks, int64_t begin_ns) {
    Record record = collective(1, "all_reduce", "", mesh_dim, ranks);
    record.begin_ns = begin_ns;
    record.end_ns = 0;
    return record;
  };
  const std::string text = where_ranks_part({rank(0, {waits("tp", {0, 1}, 40)}), rank(1, {waits("dp", {1, 3}, 20)}),
                                             rank(2, {waits("dp", {0, 2}, 30)}), rank(3, {waits("tp", {2, 3}, 50)})});
  CAPTURE(text);
  CHECK(has(text, "in collective 1 on mesh dimension dp of ranks 1, 3:\n"));
}

TEST_CASE("ranks without collectives, and without records, are not said to have begun the same") {
  const std::string off = where_ranks_part({rank(0, {}), rank(1, {})});
  CAPTURE(off);
  CHECK(off.starts_with("No collectives were recorded, so nothing could be compared"));
  const std::string one = where_ranks_part({rank(0, {collective(1, "all_reduce")})});
  CAPTURE(one);
  CHECK(one.starts_with(
      "All ranks that left records have begun the same collectives.\nThere are no records of ranks 1.\n"));
}

TEST_CASE("counts say where ranks part also where all records of it were overwritten") {
  const std::vector<Record> late = {{.sequence = 313, .kind = RecordKind::kSpan, .name = "step", .begin_ns = 1}};
  RankRecords zero = rank(0, late), one = rank(1, late);
  zero.counts = {{.mesh_dim = "tp", .ranks = {0, 1}, .count = 7}};
  one.counts = {{.mesh_dim = "tp", .ranks = {0, 1}, .count = 5}};
  const std::string text = where_ranks_part({zero, one});
  CAPTURE(text);
  CHECK(
      text.starts_with("The ranks first part in collective 6 on mesh dimension tp of ranks 0, 1:\n"
                       "  rank 0 came to it; its record is no longer kept\n"
                       "  rank 1 did not come to it\n"
                       "rank 0, 1 records after 312 that were overwritten: failed\n"));
  one.counts.front().count = 7;
  CHECK(where_ranks_part({zero, one}).starts_with("All ranks have begun the same collectives.\n"));
}

TEST_CASE("records of any text go to a file and back; other files are refused") {
  const PrivateFolder folder;
  Record odd = collective(3, "all_reduce", "a \"quoted\"\n path");
  odd.waited_from_ns = 7;
  RankRecords written = rank(11, {odd, collective(4, "barrier")}, "a text\nof two lines");
  written.counts = {{.mesh_dim = "tp", .ranks = {0, 11}, .count = 4}, {.mesh_dim = "0", .ranks = {11}, .count = 0}};
  write_records(folder.path() + "/new", written);
  write_records(folder.path() + "/new", rank(2, {}));
  write_records(folder.path() + "/new", written);
  const std::vector<RankRecords> read = read_all_records(folder.path() + "/new");
  REQUIRE(read.size() == 2);
  CHECK(read[0] == rank(2, {}));
  CHECK(read[1] == written);
  // An earlier version wrote no counts.
  std::ofstream(records_file(folder.path() + "/new", 3)) << "{\"failure\": \"x\", \"rank\": 3}\n";
  CHECK(read_all_records(folder.path() + "/new").at(1) == rank(3, {}, "x"));
  check_refused<std::invalid_argument>([&] { read_all_records(folder.path() + "/missing"); },
                                       "holds no rank's records");
  std::ofstream(records_file(folder.path() + "/new", 3)) << "{\"rank\": 3, \"failure\": \"\"}\n[1, 77]\n";
  check_refused<std::runtime_error>([&] { read_all_records(folder.path() + "/new"); },
                                    "records.3.jsonl does not hold a rank's records");
  // Files and folders with other names are left alone.
  fs::remove(records_file(folder.path() + "/new", 3));
  for (const char* name :
       {"/new/records.x.jsonl", "/new/records..jsonl", "/new/records.jsonl", "/new/records.07.jsonl"})
    std::ofstream(folder.path() + name) << "x";
  fs::create_directory(records_file(folder.path() + "/new", 4));
  CHECK(read_all_records(folder.path() + "/new").size() == 2);
  std::ofstream(folder.path() + "/file") << "x";
  check_refused<std::runtime_error>([&] { write_records(folder.path() + "/file", written); },
                                    "the records of rank 11 cannot be written to");
}

TEST_CASE("records are for their user alone, and are not written through what another one has put in their place") {
  const PrivateFolder folder;
  const std::string records = folder.path() + "/a/records", mine = folder.path() + "/mine";
  write_records(records, rank(1, {}));
  CHECK(fs::status(records).permissions() == fs::perms::owner_all);
  CHECK(fs::status(records_file(records, 1)).permissions() == (fs::perms::owner_read | fs::perms::owner_write));
  std::ofstream(mine) << "x";
  fs::create_symlink(mine, fmt::format("{}.{}", records_file(records, 2), getpid()));
  write_records(records, rank(2, {}));
  CHECK(fs::file_size(mine) == 1);
  CHECK(read_all_records(records).size() == 2);
  CHECK(prepare_records(folder.path() + "/b/new/", 0, 2).empty());
  CHECK(fs::status(folder.path() + "/b/new").permissions() == fs::perms::owner_all);
  CHECK(prepare_records(mine, 0, 2) == "that is no folder");
  // Who is root here may write everywhere; another user asks whose the folder is.
  if (geteuid() == 0 && chown(records.c_str(), 12345, static_cast<gid_t>(-1)) == 0) {
    fs::permissions(folder.path() + "/a", fs::perms::others_all, fs::perm_options::add);
    const pid_t other = fork();
    if (other == 0) {
      const bool is_other = chdir((folder.path() + "/a").c_str()) == 0 && setuid(23456) == 0;
      _exit(is_other && prepare_records("records", 0, 2) == "the folder is user 12345's; name one of yours" ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(other, &status, 0) == other);
    CHECK(status == 0);
  }
}

TEST_CASE("rank 0 removes the files of all ranks that the job does not have, and nothing else") {
  const PrivateFolder folder;
  const auto file = [&](const std::string& rank) { return folder.path() + "/records." + rank + ".jsonl"; };
  for (const char* rank : {"0", "1", "3", "4", "17", "x", "05", "-2"}) std::ofstream(file(rank)) << "x";
  fs::create_directory(file("9"));
  CHECK(prepare_records(folder.path(), 1, 2).empty());
  CHECK_FALSE(fs::exists(file("1")));
  CHECK(fs::exists(file("17")));
  CHECK(prepare_records(folder.path(), 0, 2).empty());
  for (const char* rank : {"0", "3", "4", "17"}) CHECK_FALSE(fs::exists(file(rank)));
  for (const char* rank : {"x", "05", "-2", "9"}) CHECK(fs::exists(file(rank)));
}

TEST_CASE("records are sent as bytes") {
  Record odd = collective(3, "all_reduce", "a path \xff");
  odd.rank = 5;
  odd.waited_from_ns = 7;
  const std::vector<Record> sent = {odd, {.rank = 5, .kind = RecordKind::kSpan, .name = "step"}};
  CHECK((decode_records(encode_records(sent), 5) == sent));
  CHECK(decode_records(encode_records({}), 5).empty());
  CHECK_THROWS(decode_records({1, 2, 3}, 5));
}

TEST_CASE("tools/records: it says where the ranks part, and writes what they did as a trace") {
  const PrivateFolder folder;
  const std::string trace = folder.path() + "/trace.json", records = folder.path() + "/records";
  write_records(records, rank(0, {collective(1, "all_reduce"), collective(2, "all_gather")}));
  write_records(records, rank(1, {collective(1, "all_reduce")}));
  const auto run = [](const std::string& arguments) { return shell("tools/records_reader/records " + arguments); };
  const ShellOutcome both = run(records + " --trace " + trace);
  CAPTURE(both.output);
  CHECK(both.exit_code == 0);
  CHECK(both.output.starts_with("The ranks first part in collective 2 on mesh dimension tp of ranks 0, 1:\n"));
  int slices = 0;
  const nlohmann::json written = nlohmann::json::parse(std::ifstream(trace));
  for (const nlohmann::json& event : written.at("traceEvents")) slices += event.at("ph") == "X" ? 1 : 0;
  CHECK(slices == 3);
  CHECK(run(records).output == both.output);
  fs::create_directory(records + "/restart_1");
  CHECK(run(records).output == both.output + records + "/restart_1 is of restart 1\n");
  const ShellOutcome refused = run(records + " --trace /no/such/folder/trace.json");
  CAPTURE(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "the trace cannot be written to /no/such/folder/trace.json: No such file or directory"));
  for (const std::string& arguments : {records + " --trace", records + " x y", std::string("--help"), std::string()}) {
    CAPTURE(arguments);
    CHECK(run(arguments).exit_code == 2);
    CHECK(has(run(arguments).output, "usage: tools/records FOLDER [--trace FILE]"));
  }
}

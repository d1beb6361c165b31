#include "tessera/inspect/parting.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/mesh/record_file.h"
#include "tessera/tests/harness/refused.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera;
using tessera::testing::check_refused;
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

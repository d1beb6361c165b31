#include "tessera/inspect/trace.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/inspect/clock_offset.h"
#include "tessera/inspect/lanes.h"
#include "tessera/inspect/timeline.h"

using namespace tessera;

namespace {

Record made(RecordKind kind, const char* name, int64_t begin_ns, int64_t end_ns, const char* path = "") {
  return {.rank = 0, .kind = kind, .name = name, .path = path, .begin_ns = begin_ns, .end_ns = end_ns};
}
Record op(const char* name, int64_t begin_ns, int64_t end_ns, const char* path = "") {
  return made(RecordKind::kOperator, name, begin_ns, end_ns, path);
}
Record collective(const char* name, const char* mesh_dim, int64_t begin_ns, int64_t end_ns) {
  Record record = made(RecordKind::kCollective, name, begin_ns, end_ns);
  record.mesh_dim = mesh_dim;
  record.ranks = {0, 1};
  record.serial = 1;
  record.bytes = 8;
  return record;
}

// Returns "NAME: slice begin-end, slice begin-end" for each lane.
std::vector<std::string> texts_of(const std::vector<Lane>& lanes) {
  std::vector<std::string> texts;
  for (const Lane& lane : lanes) {
    std::string text = std::to_string(lane.rank) + " " + lane.name + ":";
    for (const LaneSlice& slice : lane.slices) {
      text += " " + slice.name + " " + std::to_string(slice.begin_ns) + "-" + std::to_string(slice.end_ns);
    }
    texts.push_back(text);
  }
  return texts;
}

using Texts = std::vector<std::string>;

}  // namespace

TEST_CASE("lanes: spans, modules, operators, and collectives by mesh dimension") {
  CHECK(texts_of(lanes_of({made(RecordKind::kSpan, "step", 1, 100), made(RecordKind::kModule, "block", 2, 50),
                           op("aten::mm", 3, 10), collective("all_reduce", "tp", 4, 9),
                           collective("all_gather", "dp", 20, 30), collective("all_reduce", "tp", 9, 12)})) ==
        Texts{"0 spans: step 1-100", "0 modules: block 2-50", "0 operators: aten::mm 3-10",
              "0 collectives on tp: all_reduce 4-9 all_reduce 9-12", "0 collectives on dp: all_gather 20-30"});
}

TEST_CASE("lanes: ranks stand in their order, and what has not ended goes on to the rank's last time") {
  std::vector<Record> records = {op("b", 1, 9), op("open", 2, 0), op("a", 5, 6)};
  records[0].rank = records[1].rank = 1;
  CHECK(texts_of(lanes_of(records)) == Texts{"0 operators: a 5-6", "1 operators: b 1-9 open 2-9"});
}

TEST_CASE("lanes: a rank's last time may be the begin of a wait") {
  Record open = collective("all_reduce", "tp", 5, 0);
  open.waited_from_ns = 8;
  const std::vector<Lane> lanes = lanes_of({collective("all_gather", "tp", 1, 3), open});
  CHECK(texts_of(lanes) == Texts{"0 collectives on tp: all_gather 1-3 all_reduce 5-8"});
  CHECK_FALSE(lanes[0].slices[0].is_open);
  CHECK(lanes[0].slices[1].is_open);
}

TEST_CASE("lanes: slices nest or stand apart") {
  CHECK(texts_of(lanes_of({op("inner", 2, 4), op("outer", 1, 10), op("same", 1, 10), op("crosses", 8, 12),
                           op("again", 11, 13), op("after", 12, 13)})) ==
        Texts{"0 operators: outer 1-10 same 1-10 inner 2-4 again 11-13 after 12-13", "0 operators (2): crosses 8-12"});
}

TEST_CASE("lanes: collectives that are in flight at once stand apart even where they nest") {
  CHECK(texts_of(lanes_of({collective("a", "tp", 1, 10), collective("b", "tp", 2, 5), collective("c", "tp", 3, 4),
                           collective("d", "tp", 6, 7), collective("e", "dp", 2, 5)})) ==
        Texts{"0 collectives on tp: a 1-10", "0 collectives on tp (2): b 2-5 d 6-7", "0 collectives on tp (3): c 3-4",
              "0 collectives on dp: e 2-5"});
}

TEST_CASE("lanes: operators in a row that used one module's parameters are a slice of it") {
  const std::vector<Lane> lanes = lanes_of(
      {op("aten::t", 1, 2, "block.up.weight"), op("aten::addmm", 3, 9, "block.up.bias"), op("aten::relu", 10, 11),
       op("aten::mm", 12, 15, "block.up.weight"), op("aten::mm", 16, 17, "block.down.weight"),
       op("aten::mul", 18, 19, "scale"), made(RecordKind::kModule, "block", 0, 20)});
  REQUIRE(lanes.size() == 2);
  CHECK(texts_of(lanes)[0] == "0 modules: block 0-20 block.up 1-9 block.up 12-15 block.down 16-17");
  CHECK(lanes[0].slices[1].record == -1);
  CHECK(lanes[0].slices[0].record == 6);
}

TEST_CASE("chrome_trace: a process for each rank, a thread for each lane, and slices that nest") {
  std::vector<Record> records;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const std::vector<Record> of_rank = {
        made(RecordKind::kSpan, "step \"1\"", 1000, 9000), op("aten::mm", 1500, 4000, "up.weight"),
        collective("all_reduce", "tp", 2000, 3500), collective("all_gather", "dp", 3000, 0)};
    for (Record record : of_rank) {
      record.rank = rank;
      records.push_back(record);
    }
  }
  records[2].op = "aten::mm";
  records[2].path = "up.weight";
  records[2].waited_from_ns = 2500;
  const nlohmann::json trace = nlohmann::json::parse(chrome_trace(records));
  std::map<std::pair<int64_t, int64_t>, std::string> threads;
  std::map<int64_t, std::string> processes;
  std::map<std::pair<int64_t, int64_t>, std::vector<nlohmann::json>> slices;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    const int64_t pid = event.at("pid"), tid = event.at("tid");
    if (event.at("name") == "process_name") processes[pid] = event.at("args").at("name");
    if (event.at("name") == "thread_name") threads[{pid, tid}] = event.at("args").at("name");
    if (event.at("ph") == "X") slices[{pid, tid}].push_back(event);
  }
  CHECK(processes == std::map<int64_t, std::string>{{0, "rank 0"}, {1, "rank 1"}});
  for (int64_t rank = 0; rank < 2; ++rank) {
    CHECK(threads[{rank, 1}] == "spans");
    CHECK(threads[{rank, 2}] == "modules");
    CHECK(threads[{rank, 3}] == "operators");
    CHECK(threads[{rank, 4}] == "collectives on tp");
    CHECK(threads[{rank, 5}] == "collectives on dp");
  }
  CHECK(threads.size() == 10);
  CHECK(slices.size() == 10);
  const nlohmann::json& step = slices[{0, 1}].at(0);
  CHECK(step.at("name") == "step \"1\"");
  CHECK(step.at("ts") == 0.0);  // microseconds since the first record
  CHECK(step.at("dur") == 8.0);
  CHECK(slices[{0, 2}].at(0).at("name") == "up");
  const nlohmann::json& mm = slices[{0, 3}].at(0);
  CHECK(mm.at("cat") == "operator");
  CHECK(mm.at("ts") == 0.5);
  CHECK(mm.at("dur") == 2.5);
  CHECK(mm.at("args") == nlohmann::json({{"path", "up.weight"}}));
  CHECK(slices[{0, 4}].at(0).at("args") == nlohmann::json({{"path", "up.weight"},
                                                           {"operator", "aten::mm"},
                                                           {"bytes", 8},
                                                           {"mesh dimension", "tp"},
                                                           {"ranks", "0, 1"},
                                                           {"number", 1},
                                                           {"waited us", 1.0}}));
  CHECK(slices[{1, 5}].at(0).at("args").at("has ended") == false);
  CHECK(slices[{1, 5}].at(0).at("dur") == 6.0);  // to the end of "step"
}

TEST_CASE("chrome_trace: it says when it begins, and where a rank's first records were overwritten") {
  std::vector<Record> records = {op("a", 1795919581123456789, 1795919581123456799), op("b", 1795919582000000000, 0),
                                 op("c", 1795919583000000000, 1795919583000000001)};
  records[0].sequence = 313;
  records[1].sequence = 314;
  records[2].rank = 1;
  records[2].sequence = 1;
  const nlohmann::json trace = nlohmann::json::parse(chrome_trace(records));
  CHECK(trace.at("otherData") == nlohmann::json({{"begins at", "2026-11-29 02:33:01.123 UTC"}}));
  std::map<int64_t, std::string> processes;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    const int64_t pid = event.at("pid");
    if (event.at("name") == "process_name") processes[pid] = event.at("args").at("name");
  }
  CHECK(processes == std::map<int64_t, std::string>{{0, "rank 0, from its record 313 on"}, {1, "rank 1"}});
}

TEST_CASE("chrome_trace: without records it has no events") {
  CHECK(nlohmann::json::parse(chrome_trace({})).at("traceEvents").empty());
}

TEST_CASE("collective_totals: by kind and mesh dimension") {
  std::vector<Record> records = {collective("all_reduce", "tp", 10, 30), op("aten::mm", 1, 2),
                                 collective("all_gather", "tp", 30, 31), collective("all_reduce", "tp", 40, 45),
                                 collective("all_reduce", "dp", 50, 60), collective("all_reduce", "tp", 70, 0)};
  records[0].waited_from_ns = 25;
  CHECK((collective_totals(records) ==
         std::vector<CollectiveTotal>{
             {.name = "all_reduce", .mesh_dim = "tp", .count = 2, .bytes = 16, .in_flight_ns = 25, .waited_ns = 5},
             {.name = "all_gather", .mesh_dim = "tp", .count = 1, .bytes = 8, .in_flight_ns = 1, .waited_ns = 0},
             {.name = "all_reduce", .mesh_dim = "dp", .count = 1, .bytes = 8, .in_flight_ns = 10, .waited_ns = 0}}));
  CHECK(collective_totals({}).empty());
  CHECK(to_string(std::vector<CollectiveTotal>{{.name = "all_reduce",
                                                .mesh_dim = "tp",
                                                .count = 2,
                                                .bytes = 16,
                                                .in_flight_ns = 2500000,
                                                .waited_ns = 1000}}) ==
        "kind            mesh dim    count           bytes  ms in flight   ms waited\n"
        "all_reduce      tp              2              16         2.500       0.001\n");
}

TEST_CASE("late_ranks: the last to begin a collective, and how long others had waited for it") {
  const auto begun = [](int64_t rank, int64_t serial, int64_t begin_ns, int64_t waited_from_ns) {
    Record record = collective("all_reduce", "tp", begin_ns, begin_ns + 1000);
    record.rank = rank;
    record.ranks = {0, 1, 2};
    record.serial = serial;
    record.waited_from_ns = waited_from_ns;
    return record;
  };
  Record of_pair = begun(0, 1, 500, 510), of_other_dim = begun(1, 1, 0, 5);
  of_pair.ranks = {0, 1};
  of_other_dim.mesh_dim = "dp";
  const std::vector<Record> records = {
      begun(0, 1, 10, 15), begun(0, 2, 100, 110), begun(0, 3, 200, 0),   of_pair,
      begun(1, 1, 30, 90), begun(1, 2, 140, 150), begun(1, 3, 210, 220), of_other_dim,
      begun(2, 1, 70, 71), begun(2, 2, 120, 125), begun(2, 4, 900, 910), op("aten::mm", 1, 2),
  };
  // In collective 1 rank 2 is last: rank 0 had waited 55, and rank 1 begins to wait later. In 2 rank 1 is last: the
  // others had waited 30 and 15. In 3 rank 1 is last, and rank 0 never waits. One rank alone has each of the others.
  CHECK((late_ranks(records) == std::vector<RankLateness>{{.rank = 2, .collectives = 2, .last = 1, .waited_ns = 55},
                                                          {.rank = 1, .collectives = 3, .last = 2, .waited_ns = 45},
                                                          {.rank = 0, .collectives = 3, .last = 0, .waited_ns = 0}}));
  CHECK(late_ranks({}).empty());
  CHECK(to_string(std::vector<RankLateness>{{.rank = 3, .collectives = 40, .last = 12, .waited_ns = 2500000},
                                            {.rank = 0, .collectives = 40, .last = 1, .waited_ns = 1000}}) ==
        " rank  collectives  came last  ms that others waited\n"
        "    3           40         12                  2.500\n"
        "    0           40          1                  0.001\n");
}

TEST_CASE("clock_offset: within what barriers allow, the nearest to 0") {
  struct Row {
    const char* why;
    std::vector<BarrierTimes> first, other;
    int64_t want;
  };
  const std::vector<Row> rows = {
      {"no barrier", {}, {}, 0},
      {"one clock", {{10, 20}}, {{12, 19}}, 0},
      {"far ahead", {{10, 20}}, {{112, 119}}, 92},
      {"far behind", {{1010, 1020}}, {{12, 19}}, -991},
      {"two barriers are closer", {{10, 20}, {30, 31}}, {{112, 119}, {129, 131}}, 98},
      {"the clock was set between them", {{10, 20}, {30, 40}}, {{112, 119}, {230, 240}}, 149},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(clock_offset(row.first, row.other) == row.want);
  }
}

TEST_CASE("timeline_svg: a bar for each slice in its part of the time") {
  const std::vector<Record> records = {op("aten::mm", 1000000, 6000000), op("aten::add", 6000000, 11000000),
                                       collective("all_reduce", "tp", 6000000, 11000000)};
  const std::string svg = timeline_svg(records, {.width = 800, .title = "a step <1>"});
  CHECK(svg.starts_with("<svg "));
  CHECK(svg.find("<title>a step &lt;1&gt;</title>") != std::string::npos);
  CHECK(svg.find(">rank 0</text>") != std::string::npos);
  CHECK(svg.find(">collectives on tp</text>") != std::string::npos);
  CHECK(svg.find("<title>aten::mm, 5.000 ms</title>") != std::string::npos);
  CHECK(svg.find(">aten::mm</text>") != std::string::npos);
  CHECK(svg.find(">10 ms</text>") == std::string::npos);  // it would reach beyond the picture
  CHECK(svg.find(">9 ms</text>") != std::string::npos);
  const std::string part = timeline_svg(records, {.begin_ns = 6500000, .end_ns = 7000000});
  CHECK(part.find("aten::mm") == std::string::npos);
  CHECK(part.find("<title>aten::add, 5.000 ms</title>") != std::string::npos);
  CHECK(part.find(">0.5 ms</text>") == std::string::npos);
  CHECK(timeline_svg({}).find("nothing was recorded") != std::string::npos);
}

TEST_CASE("timeline_svg: what has not ended is drawn, also where nothing was recorded after its begin") {
  const std::vector<Record> records = {collective("all_reduce", "tp", 1000000, 6000000),
                                       collective("all_gather", "tp", 11000000, 0)};
  const std::string svg = timeline_svg(records, {.width = 800});
  // The picture's right edge is at 790, and the bar is half a pixel wide.
  CHECK(svg.find("<rect x=\"789.5\" y=\"28\" width=\"0.5\"") != std::string::npos);
  CHECK(svg.find("<title>all_gather, 0.000 ms, has not ended</title>") != std::string::npos);
  CHECK(timeline_svg({records[1]}).find("<title>all_gather, 0.000 ms, has not ended</title>") != std::string::npos);
}

TEST_CASE("timeline_svg: thousands of short operators are few bars") {
  std::vector<Record> records;
  for (int64_t i = 0; i < 20000; ++i) records.push_back(op("aten::mm", 10 * i, 10 * i + 10));
  const std::string svg = timeline_svg(records);
  int64_t bars = 0;
  for (std::size_t at = svg.find("<title>aten"); at != std::string::npos; at = svg.find("<title>aten", at + 1)) ++bars;
  CHECK(bars > 100);
  CHECK(bars < 3000);
}

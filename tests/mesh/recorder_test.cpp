#include "tessera/mesh/recorder.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"

using namespace tessera;

namespace {

std::vector<std::string> names_of(const std::vector<Record>& records) {
  std::vector<std::string> names;
  for (const Record& record : records) names.push_back(record.name);
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("recorder: spans are in the order of their begins, and enclose each other") {
  Recorder recorder(3, 16);
  {
    const Recorder::Span outer(recorder, "step");
    const std::string path = "layers.0.up.weight";
    {
      const Recorder::Span inner(recorder, RecordKind::kOperator, "aten::mm", [&] { return &path; });
    }
    const std::vector<Record> during = recorder.records();
    REQUIRE(during.size() == 2);
    CHECK_FALSE(during[0].has_ended());
    CHECK(during[1].has_ended());
  }
  const std::vector<Record> records = recorder.records();
  REQUIRE(records.size() == 2);
  CHECK(records[0].rank == 3);
  CHECK(records[0].sequence == 1);
  CHECK(records[0].kind == RecordKind::kSpan);
  CHECK(records[0].name == "step");
  CHECK(records[0].path == "");
  CHECK(records[1].sequence == 2);
  CHECK(records[1].kind == RecordKind::kOperator);
  CHECK(records[1].name == "aten::mm");
  CHECK(records[1].path == "layers.0.up.weight");
  CHECK(records[0].begin_ns <= records[1].begin_ns);
  CHECK(records[1].begin_ns <= records[1].end_ns);
  CHECK(records[1].end_ns <= records[0].end_ns);
}

TEST_CASE("recorder: its times are those of the system's clock") {
  Recorder recorder(0, 16);
  const int64_t before = c10::getTime();
  { const Recorder::Span span(recorder, "a"); }
  const int64_t after = c10::getTime();
  const Record record = recorder.records().at(0);
  constexpr int64_t kCalibration = 1000000;  // a millisecond: far more than the counter is off after so short a time
  CHECK(record.begin_ns >= before - kCalibration);
  CHECK(record.end_ns <= after + kCalibration);
}

TEST_CASE("recorder: a full ring keeps the last records") {
  Recorder recorder(0, 4);
  CHECK(recorder.capacity() == 4);
  {
    const Recorder::Span overwritten(recorder, "long");  // its end must not reach the record that took its slot
    for (const char* name : {"a", "b", "c", "d", "e"}) const Recorder::Span span(recorder, name);
  }
  CHECK(names_of(recorder.records()) == Names{"b", "c", "d", "e"});
  CHECK(names_of(recorder.records(2)) == Names{"d", "e"});
  const Recorder::Span f(recorder, "f");
  CHECK(names_of(recorder.records()) == Names{"c", "d", "e", "f"});
  CHECK(recorder.records(2)[0].has_ended());
  CHECK_FALSE(recorder.records(1)[0].has_ended());
}

TEST_CASE("recorder: the capacity is a power of two, and 0 switches it off") {
  CHECK(Recorder(0, 5).capacity() == 8);
  Recorder off(0, 0);
  CHECK_FALSE(off.on());
  off.set_on(true);
  CHECK_FALSE(off.on());
  { const Recorder::Span span(off, "a"); }
  CHECK(off.records().empty());
  off.restart(2);
  { const Recorder::Span span(off, "a"); }
  CHECK(names_of(off.records()) == Names{"a"});
  off.set_on(false);
  { const Recorder::Span span(off, "b"); }
  CHECK(names_of(off.records()) == Names{"a"});
  off.restart(2);
  CHECK(off.records().empty());
}

TEST_CASE("recorder: names are kept when their texts have gone") {
  Recorder recorder(0, 64);
  for (int i = 0; i < 20; ++i) {
    const std::string name = "a name that is longer than a small string " + std::to_string(i % 3);
    const Recorder::Span span(recorder, name);
  }
  const std::vector<Record> records = recorder.records();
  REQUIRE(records.size() == 20);
  for (std::size_t i = 0; i < records.size(); ++i) {
    CHECK(records[i].name == "a name that is longer than a small string " + std::to_string(i % 3));
  }
}

TEST_CASE("recorder: threads may write while another one reads") {
  Recorder recorder(0, 64);
  std::atomic<bool> done = false;
  std::vector<std::thread> writers;
  for (const char* const name : {"even", "odd"}) {
    writers.emplace_back([&recorder, name] {
      const std::string path = std::string(name) + ".path";
      for (int i = 0; i < 5000; ++i) {
        const Recorder::Span span(recorder, RecordKind::kModule, name, [&] { return &path; });
      }
    });
  }
  std::thread reader([&] {
    while (!done) {
      uint64_t last = 0;
      for (const Record& record : recorder.records()) {
        CHECK(record.path == record.name + ".path");  // no record is made of parts of two
        CHECK(record.sequence > last);
        last = record.sequence;
      }
    }
  });
  for (std::thread& writer : writers) writer.join();
  done = true;
  reader.join();
  const std::vector<Record> records = recorder.records();
  CHECK(records.size() == 64);
  CHECK(records.back().sequence == 10000);
}

TEST_CASE("recorder: a record is printed as one line") {
  Record record{.sequence = 7,
                .kind = RecordKind::kCollective,
                .name = "all_reduce",
                .path = "up.weight",
                .begin_ns = 1000000,
                .end_ns = 1125000,
                .op = "aten::mm",
                .mesh_dim = "tp",
                .ranks = {0, 2},
                .serial = 3,
                .bytes = 4096};
  CHECK(to_string(record) == "#7 all_reduce of aten::mm (up.weight) on tp, no. 3 of ranks 0, 2, 4096 bytes, 0.125 ms");
  record.begin_ns = 1795919580999999999;
  record.end_ns = 0;
  CHECK(to_string(record) ==
        "#7 all_reduce of aten::mm (up.weight) on tp, no. 3 of ranks 0, 2, 4096 bytes, has not ended since 2026-11-29 "
        "02:33:00.999 UTC");
  record.waited_from_ns = 1795919581123456789;
  CHECK(to_string(record) ==
        "#7 all_reduce of aten::mm (up.weight) on tp, no. 3 of ranks 0, 2, 4096 bytes, waits since 2026-11-29 "
        "02:33:01.123 UTC");
  CHECK(utc_text(0) == "1970-01-01 00:00:00.000 UTC");
  CHECK(utc_text(-1) == "1969-12-31 23:59:59.999 UTC");
  record = {.sequence = 8, .kind = RecordKind::kSpan, .name = "step", .begin_ns = 0, .end_ns = 2000000};
  CHECK(to_string(std::vector<Record>{record, record}) == "#8 step, 2.000 ms\n#8 step, 2.000 ms\n");
}

TEST_CASE("recorder: every rank numbers the collectives of a group alike") {
  for (const int64_t size : {2, 4}) {
    CAPTURE(size);
    std::vector<std::vector<Record>> of_rank(static_cast<std::size_t>(size));
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {size / 2, 2}, {"dp", "tp"}, world);
      const Checked off(mesh, false);  // whose comparison waits
      const at::Tensor x = at::ones({6});
      {
        const std::string path = "up.weight";
        const World::Scope scope(*world, "aten::mm", &path);
        all_reduce(x, mesh, 1, ReduceOp::kSum);
      }
      PendingCollective first = start_all_reduce(x, mesh, 1, ReduceOp::kSum);
      all_reduce(x, mesh, 0, ReduceOp::kSum);  // of one rank where there are two: nothing is communicated
      first.wait();
      { const PendingCollective unread = start_all_reduce(x, mesh, 1, ReduceOp::kSum); }
      of_rank[static_cast<std::size_t>(world->rank())] = world->recorder().records();
    });
    for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
      CAPTURE(rank);
      const std::vector<Record>& records = of_rank[rank];
      const int64_t here = static_cast<int64_t>(rank);
      REQUIRE(records.size() == (size == 2 ? 3 : 4));
      for (const Record& record : records) {
        CHECK(record.kind == RecordKind::kCollective);
        CHECK(record.name == "all_reduce");
        CHECK(record.bytes == 24);
        CHECK(record.has_ended());
      }
      CHECK(records[0].op == "aten::mm");
      CHECK(records[0].path == "up.weight");
      CHECK(records[0].mesh_dim == "tp");
      CHECK(records[0].ranks == std::vector<int64_t>{here / 2 * 2, here / 2 * 2 + 1});
      CHECK(records[0].serial == 1);
      CHECK(records[1].op == "");
      CHECK(records[1].path == "");
      CHECK(records[1].serial == 2);
      CHECK(records[1].begin_ns <= records[1].waited_from_ns);
      CHECK(records[1].waited_from_ns <= records[1].end_ns);
      CHECK(records.back().serial == 3);
      CHECK(records.back().waited_from_ns == 0);  // nobody read it
      if (size == 2) continue;
      CHECK(records[2].mesh_dim == "dp");
      CHECK(records[2].serial == 1);
      CHECK(records[1].begin_ns <= records[2].begin_ns);  // the second was in flight around the third
      CHECK(records[2].end_ns <= records[1].end_ns);
    }
  }
}

TEST_CASE("recorder: the collectives of a check are not recorded") {
  std::vector<std::size_t> counts(2);
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
    const Checked checked(mesh);
    all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
    counts[static_cast<std::size_t>(world->rank())] = world->recorder().records().size();
  });
  CHECK(counts == std::vector<std::size_t>{1, 1});
}

TEST_CASE("recorder: under Checked the wait begins with the comparison") {
  std::vector<Record> last(2);
  std::atomic<const Recorder*> first{nullptr};
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
    const Checked checked(mesh);
    if (world->rank() == 0) first = &world->recorder();
    all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
    const auto waits = [&] {
      const std::vector<Record> there = first.load()->records();
      return there.size() == 2 && there[1].waited_from_ns != 0;
    };
    for (int i = 0; world->rank() == 1 && i < 500 && !waits(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
    last[static_cast<std::size_t>(world->rank())] = world->recorder().records().back();
    PendingCollective later = start_all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
    CHECK(world->recorder().records().back().waited_from_ns == 0);  // it goes on meanwhile
    later.wait();
    CHECK(world->recorder().records().back().waited_from_ns != 0);
  });
  CHECK(last[0].waited_from_ns < last[1].begin_ns);
}

TEST_CASE("recorder: what began before a restart leaves the records after it alone") {
  Recorder recorder(0, 4);
  const std::vector<int64_t> pair = {0, 1};
  const uint64_t flying = recorder.begin({.kind = "all_reduce", .mesh_dim = "tp", .ranks = pair});
  {
    const Recorder::Span epoch(recorder, "epoch");
    recorder.restart(4);
    CHECK(recorder.records().empty());
    recorder.begin({.kind = "barrier", .mesh_dim = "tp", .ranks = pair});
    recorder.begin({.kind = "broadcast", .mesh_dim = "tp", .ranks = pair});
    recorder.wait_begins(flying);
    recorder.end(flying);
  }
  const std::vector<Record> records = recorder.records();
  CHECK(names_of(records) == Names{"barrier", "broadcast"});
  CHECK(records[0].sequence == 1);
  for (const Record& each : records) {
    CHECK_FALSE(each.has_ended());
    CHECK(each.waited_from_ns == 0);
  }
}

TEST_CASE("recorder: a thread may read while another one restarts it") {
  Recorder recorder(0, 4);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) recorder.records();
  });
  for (std::size_t i = 0; i < 300; ++i) {
    recorder.restart(i % 3 == 0 ? 0 : 4 << (i % 6));
    for (int k = 0; recorder.on() && k < 8; ++k) const Recorder::Span span(recorder, "step");
  }
  done = true;
  reader.join();
  CHECK(recorder.records().size() == 8);
}

TEST_CASE("recorder: it counts collectives also where their records were overwritten") {
  Recorder recorder(0, 4);
  CHECK(recorder.collective_counts().empty());
  const std::vector<int64_t> pair = {0, 1}, all = {0, 1, 2, 3};
  for (int i = 0; i < 3; ++i) recorder.end(recorder.begin({.kind = "all_reduce", .mesh_dim = "tp", .ranks = pair}));
  recorder.end(recorder.begin({.kind = "barrier", .mesh_dim = "tp", .ranks = all}));
  for (const char* name : {"a", "b", "c", "d"}) const Recorder::Span span(recorder, name);
  CHECK(names_of(recorder.records()) == Names{"a", "b", "c", "d"});
  const std::vector<CollectiveCount> counts = {{.mesh_dim = "tp", .ranks = pair, .count = 3},
                                               {.mesh_dim = "tp", .ranks = all, .count = 1}};
  CHECK((recorder.collective_counts() == counts));
}

TEST_CASE("recorder: a World may be without") {
  WorldOptions options;
  options.size = 2;
  options.fake = true;
  options.recorder_capacity = 0;
  const std::shared_ptr<World> world = World::create(std::move(options));
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
  all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
  CHECK(world->recorder().records().empty());
}

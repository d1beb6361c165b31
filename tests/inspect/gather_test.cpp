// Records of real ranks: what each rank recorded of the same steps, and the trace of all.

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/dtensor.h"
#include "tessera/inspect/trace.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera;

namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : up(register_module("up", torch::nn::Linear(6, 10))), down(register_module("down", torch::nn::Linear(10, 6))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(x))); }
  torch::nn::Linear up, down;
};
TESSERA_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() : block(register_module("block", Block())) {}
  at::Tensor forward(const at::Tensor& x) { return block(x); }
  Block block;
};
TORCH_MODULE(Net);

DeviceMesh mesh_of_ranks() {
  const int64_t size = testing::world_size();
  if (size == 4) return init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, testing::world());
  return init_device_mesh("cpu", {1, size}, {"dp", "tp"}, testing::world());
}

// Trains for two steps, whose gradients are reduced over both mesh dimensions.
void train(const DeviceMesh& mesh) {
  Net net;
  auto tp = parallelize_module(net, mesh, {{"block.up", ColwiseParallel()}, {"block.down", RowwiseParallel()}});
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 2; ++step) {
    const Recorder::Span span(mesh.world().recorder(), "step");
    const at::Tensor x = from_local(torch::ones({2, 6}), mesh, {Shard(0), Replicate()});
    tp(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

using CollectiveKey = std::tuple<std::string, std::vector<int64_t>, int64_t>;  // mesh dimension, ranks, number

// Returns what identifies a collective on all its ranks, with what they must agree on.
std::map<CollectiveKey, std::string> collectives_of(const std::vector<Record>& records, int64_t rank) {
  std::map<CollectiveKey, std::string> out;
  for (const Record& r : records) {
    if (r.rank != rank || r.kind != RecordKind::kCollective) continue;
    out[{r.mesh_dim, r.ranks, r.serial}] = r.name + " " + r.op + " " + r.path;
  }
  return out;
}

std::set<std::string> names_of(const std::vector<Record>& records, RecordKind kind) {
  std::set<std::string> names;
  for (const Record& r : records) {
    if (r.kind == kind) names.insert(r.name);
  }
  return names;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("the records of a training name its operators, modules and collectives", {1, 2, 3, 4}) {
  const DeviceMesh mesh = mesh_of_ranks();
  const CommCounter counter(mesh);
  train(mesh);
  const std::vector<Record> records = mesh.world().recorder().records();
  int64_t collectives = 0, bytes = 0;
  for (const Record& r : records) {
    CHECK(r.has_ended());
    CHECK(r.rank == testing::rank());
    if (r.kind != RecordKind::kCollective) continue;
    const CollectiveRecord& counted = counter.records().at(static_cast<std::size_t>(collectives++));
    CHECK(r.name == counted.kind);
    CHECK(r.mesh_dim == counted.mesh_dim);
    CHECK(r.op == counted.op);
    CHECK(r.path == (counted.path == "-" ? "" : counted.path));
    bytes += r.bytes;
  }
  CHECK(collectives == counter.total());
  CHECK(bytes == counter.total_bytes());
  CHECK(names_of(records, RecordKind::kSpan) == std::set<std::string>{"step"});
  CHECK(names_of(records, RecordKind::kModule) == std::set<std::string>{"block"});
  const std::set<std::string> operators = names_of(records, RecordKind::kOperator);
  for (const char* name : {"aten::addmm", "aten::relu", "aten::t", "aten::mm"}) {
    CAPTURE(name);
    CHECK(operators.contains(name));
  }
  const auto used = [&](const std::string& path) {
    return std::ranges::any_of(records,
                               [&](const Record& r) { return r.kind == RecordKind::kOperator && r.path == path; });
  };
  CHECK(used("block.up.weight"));
  CHECK(used("block.down.weight"));
}

TESSERA_RANKS_TEST_CASE("gathered records match across ranks", {1, 2, 3, 4}) {
  const DeviceMesh mesh = mesh_of_ranks();
  train(mesh);
  const std::size_t mine = mesh.world().recorder().records().size();
  const std::vector<Record> records = gather_records(mesh);
  CHECK(mine > 20);
  if (testing::rank() != 0) {
    CHECK(records.empty());
    return;
  }
  for (int64_t rank = 0; rank < testing::world_size(); ++rank) {
    CAPTURE(rank);
    CHECK(std::ranges::count_if(records, [&](const Record& r) { return r.rank == rank; }) > 20);
    for (const auto& [key, text] : collectives_of(records, rank)) {
      const auto& [mesh_dim, ranks, serial] = key;
      CHECK(std::ranges::count(ranks, rank) == 1);
      for (const int64_t other : ranks) CHECK(collectives_of(records, other).at(key) == text);
    }
  }
  constexpr int64_t kSlack = 1000000;  // for what the clocks' calibrations differ by
  // No rank ends a collective before each rank of its group has begun it, in the times of one clock.
  for (const Record& a : records) {
    for (const Record& b : records) {
      if (a.kind != RecordKind::kCollective || a.name != "all_reduce" || b.name != a.name) continue;
      if (a.mesh_dim == b.mesh_dim && a.ranks == b.ranks && a.serial == b.serial) CHECK(a.begin_ns < b.end_ns + kSlack);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a trace has a lane per rank and mesh dimension, and the names of modules", {1, 4}) {
  const DeviceMesh mesh = mesh_of_ranks();
  train(mesh);
  const PrivateFolder folder;
  const std::string path = folder.path() + "/trace.json";
  write_trace(mesh, path);
  if (testing::rank() != 0) {
    CHECK_FALSE(std::ifstream(path).good());
    return;
  }
  const nlohmann::json trace = nlohmann::json::parse(std::ifstream(path));
  std::map<std::pair<int64_t, int64_t>, std::string> lanes;
  std::map<std::pair<int64_t, int64_t>, std::vector<std::pair<double, double>>> slices;
  std::map<std::string, std::set<std::string>> names;  // by lane
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    const std::pair<int64_t, int64_t> lane = {event.at("pid"), event.at("tid")};
    if (event.at("name") == "thread_name") lanes[lane] = event.at("args").at("name");
    if (event.at("ph") != "X") continue;
    slices[lane].emplace_back(event.at("ts").get<double>(),
                              event.at("ts").get<double>() + event.at("dur").get<double>());
    names[lanes.at(lane)].insert(event.at("name").get<std::string>());
  }
  std::map<std::string, int> count;
  for (const auto& [lane, name] : lanes) ++count[name];
  const int size = static_cast<int>(testing::world_size());
  for (const char* name : {"spans", "modules", "operators"}) {
    CAPTURE(name);
    CHECK(count[name] == size);
  }
  CHECK(count["collectives on dp"] == (size == 4 ? 4 : 0));
  CHECK(count["collectives on tp"] == (size == 4 ? 4 : 0));
  for (const char* module : {"block", "block.up", "block.down"}) {
    CAPTURE(module);
    CHECK(names["modules"].contains(module));
  }
  // Slices of one lane nest, to the rounding of microseconds.
  for (const auto& [lane, all] : slices) {
    std::vector<double> open;
    for (const auto& [begin, end] : all) {
      while (!open.empty() && open.back() <= begin + 1e-3) open.pop_back();
      if (!open.empty()) CHECK(end <= open.back() + 1e-3);
      open.push_back(end);
    }
  }
}

TEST_CASE("in a fake world the one rank that is there writes the trace, whichever it is") {
  const DeviceMesh mesh = init_device_mesh("cpu", {4}, {"tp"}, World::fake(3, 4));
  { const Recorder::Span span(mesh.world().recorder(), "step"); }
  const PrivateFolder folder;
  const std::string path = folder.path() + "/trace.json";
  write_trace(mesh, path);
  const nlohmann::json trace = nlohmann::json::parse(std::ifstream(path));
  CHECK(trace.at("traceEvents").at(0).at("args").at("name") == "rank 3");
}

TESSERA_RANKS_TEST_CASE("a trace that cannot be written throws on every rank", {2}) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, testing::world());
  CHECK_THROWS_WITH_AS(write_trace(mesh, "/no/such/folder/trace.json"), doctest::Contains("/no/such/folder"),
                       std::runtime_error);
  const CommCounter counter(mesh);
  write_trace(mesh, "trace.json");  // the job goes on
  CHECK(counter.count("barrier") == 8);
  CHECK(counter.count("all_gather") == 2);
  CHECK(counter.count("all_to_all") == 1);
  CHECK(counter.count("all_reduce") == 1);
}

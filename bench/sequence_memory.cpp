// Measures the bytes that a transformer block keeps for backward when its activations are sharded along the sequence,
// beside one process's bytes divided by the ranks and beside the published formula.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/block.h"
#include "tessera/bench/measure.h"
#include "tessera/bench/memory.h"
#include "tessera/bench/two_sides.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/reused_memory.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"

namespace {

using namespace tessera;
using namespace tessera::bench;

constexpr double kMost = 1.02;

const ParallelPlan kPlan = {{"norm?", SequenceParallel(0)},
                            {"qkv", ColwiseParallel({.input_layouts = Shard(0), .gather_input_again = true})},
                            {"out", RowwiseParallel({.output_layouts = Shard(0)})},
                            {"up", ColwiseParallel({.input_layouts = Shard(0), .gather_input_again = true})},
                            {"down", RowwiseParallel({.output_layouts = Shard(0)})}};

// Returns the bytes of tensors that somebody holds, without memory that is kept for reuse.
int64_t held_bytes() { return allocated_bytes() - static_cast<int64_t>(reusable_bytes()); }

// Holds a block and makes its input, on one rank.
struct Subject {
  std::function<at::Tensor()> input;  // the input is counted, as in the formula
  std::function<at::Tensor(const at::Tensor&)> forward;
};
using MakeSubject = std::function<Subject(const BlockSize& size, const DeviceMesh& mesh)>;

at::Tensor input_of(int64_t sequence, const BlockSize& size) {
  return at::ones({sequence, size.batch, size.hidden}, at::kBFloat16).requires_grad_();
}

Subject by_styles(const BlockSize& size, const DeviceMesh& mesh) {
  const auto tp = std::make_shared<Parallelized<std::shared_ptr<PlainBlock>>>(
      parallelize_module(plain_block(size, at::kBFloat16), mesh, kPlan, {.src_rank = kNoSource}));
  const auto input = [size, mesh] { return from_local(input_of(size.sequence / mesh.size(), size), mesh, {Shard(0)}); };
  return {input, [tp](const at::Tensor& x) { return (*tp)(x); }};
}

Subject by_layers(const BlockSize& size, const DeviceMesh& mesh) {
  const auto block = layers_block(size, mesh, {.params_dtype = at::kBFloat16, .sequence_parallel = true});
  const auto input = [size, mesh] { return input_of(size.sequence / mesh.size(), size); };
  return {input, [block](const at::Tensor& x) { return block->forward(x); }};
}

Subject in_one_process(const BlockSize& size, const DeviceMesh&) {
  const auto block = plain_block(size, at::kBFloat16);
  const auto input = [size] { return input_of(size.sequence, size); };
  return {input, [block](const at::Tensor& x) { return block->forward(x); }};
}

int64_t own_bytes(const at::Tensor& t) { return static_cast<int64_t>((is_dtensor(t) ? to_local(t) : t).nbytes()); }

// Returns the bytes that all ranks together keep between forward and backward. The output is not counted, since it is
// the next block's input.
int64_t saved_bytes(int64_t ranks, const BlockSize& size, const MakeSubject& make) {
  std::vector<int64_t> outputs(static_cast<std::size_t>(ranks));
  int64_t before = 0, after = 0;
  run_in_process(ranks, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {ranks}, {"tp"}, world);
    const Subject subject = make(size, mesh);
    // One rank reads while the others wait between two barriers.
    const auto read = [&](int64_t& into) {
      if (ranks > 1) barrier(mesh, 0);
      if (world->rank() == 0) into = held_bytes();
      if (ranks > 1) barrier(mesh, 0);
    };
    subject.forward(subject.input());  // makes what groups and specs keep, so that it is not counted
    read(before);
    const at::Tensor x = subject.input();
    const at::Tensor y = subject.forward(x);
    read(after);
    outputs[static_cast<std::size_t>(world->rank())] = own_bytes(y.detach());
  });
  int64_t out = after - before;
  for (const int64_t each : outputs) out -= each;
  return out;
}

// Returns the bytes of one layer's 16-bit activations. Source: Korthikanti et al., Reducing Activation Recomputation in
// Large Transformer Models, table 2.
double published_bytes(const BlockSize& size) {
  const auto s = static_cast<double>(size.sequence), b = static_cast<double>(size.batch);
  return s * b * (34 * static_cast<double>(size.hidden) + 5 * static_cast<double>(size.heads) * s);
}
// Returns the part of it that a block without dropout has: it omits two masks of sbh bytes, one of as^2b, and the
// dropped weights, 2 as^2b.
double without_dropout_bytes(const BlockSize& size) {
  const auto s = static_cast<double>(size.sequence), b = static_cast<double>(size.batch);
  return s * b * (32 * static_cast<double>(size.hidden) + 2 * static_cast<double>(size.heads) * s);
}

struct MemoryRow {
  int64_t ranks = 0;
  BlockSize size;
  double one = 0;                       // one process's bytes
  std::map<std::string, double> saved;  // one rank's bytes, by implementation

  std::string name() const { return fmt::format("{} ranks, hidden {}", ranks, size.hidden); }
  double ratio(const std::string& way) const { return saved.at(way) / (one / static_cast<double>(ranks)); }
};

void print_row(const MemoryRow& row) {
  const auto t = static_cast<double>(row.ranks);
  fmt::print("{:<26}{:>14.0f}{:>14.0f}{:>14.0f}", row.name(), published_bytes(row.size) / t,
             without_dropout_bytes(row.size) / t, row.one / t);
  for (const char* way : {"styles", "layers"}) fmt::print("{:>12.0f}{:>9.4f}", row.saved.at(way), row.ratio(way));
  fmt::print("\n");
}

MemoryRow measure(int64_t ranks, const BlockSize& size) {
  MemoryRow row{.ranks = ranks, .size = size, .one = static_cast<double>(saved_bytes(1, size, in_one_process))};
  const auto a_rank = [&](const MakeSubject& make) {
    return static_cast<double>(saved_bytes(ranks, size, make)) / static_cast<double>(ranks);
  };
  row.saved = {{"styles", a_rank(by_styles)}, {"layers", a_rank(by_layers)}};
  return row;
}

nlohmann::json json_of(const MemoryRow& row) {
  const auto t = static_cast<double>(row.ranks);
  nlohmann::json out = {{"name", row.name()},
                        {"ranks", row.ranks},
                        {"hidden", row.size.hidden},
                        {"published_bytes", published_bytes(row.size) / t},
                        {"without_dropout_bytes", without_dropout_bytes(row.size) / t},
                        {"one_process_bytes", row.one / t}};
  for (const auto& [way, bytes] : row.saved) {
    out[way + "_bytes"] = bytes;
    out[way + "_ratio"] = row.ratio(way);
  }
  return out;
}

bool run(const std::vector<int64_t>& ranks, const std::vector<int64_t>& hidden, const BlockSize& shape,
         const std::string& json, bool check) {
  fmt::print("{:<26}{:>14}{:>14}{:>14}{:>12}{:>9}{:>12}{:>9}\n", "bytes per rank, bfloat16", "published", "no dropout",
             "one process/t", "styles", "ratio", "layers", "ratio");
  std::vector<Goal> goals;
  nlohmann::json rows = nlohmann::json::array();
  for (const int64_t t : ranks) {
    for (const int64_t each : hidden) {
      BlockSize size = shape;
      size.hidden = each;
      size.heads = std::max<int64_t>(t, each / 64);
      const MemoryRow row = measure(t, size);
      print_row(row);
      rows.push_back(json_of(row));
      for (const std::string way : {"styles", "layers"}) {
        goals.push_back(
            {fmt::format("{}, {}: at most {} of one process's part: {:.4f}", row.name(), way, kMost, row.ratio(way)),
             row.ratio(way) <= kMost});
      }
    }
  }
  const bool met = print_goals(goals);
  if (!json.empty()) write_json(json, "sequence_memory", rows);
  return met || !check;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Bytes that a transformer block, sharded along the sequence, keeps for backward");
  std::vector<int64_t> ranks = {2, 4}, hidden = {256, 512, 1024};
  BlockSize shape;
  std::string json;
  bool check = false, quick = false;
  app.add_option("--ranks", ranks, "numbers of ranks, threads of this process")->delimiter(',');
  app.add_option("--hidden", hidden, "features")->delimiter(',');
  app.add_option("--sequence", shape.sequence, "tokens of a sequence; the ranks divide it")->check(CLI::PositiveNumber);
  app.add_option("--batch", shape.batch, "sequences")->check(CLI::PositiveNumber);
  app.add_option("--json", json, "write the figures to this file too");
  app.add_flag("--check", check, "fail when a goal is missed");
  app.add_flag("--quick", quick, "one small row, whatever is given");
  CLI11_PARSE(app, argc, argv);
  if (quick) ranks = {2}, hidden = {256};
  return run_main("sequence_memory", [&] {
    restart_peak();  // starts counting
    return run(ranks, hidden, shape, json, check);
  });
}

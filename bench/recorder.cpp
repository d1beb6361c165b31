// Measures what the recorder costs: a record beside one turn of an empty loop, and a training step of a small
// transformer with the recorder on beside the same step with it off. Nothing is communicated, so that what the recorder
// takes is the largest part of a step that it can be.

#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/measure.h"
#include "tessera/bench/paired.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/recorder.h"
#include "tessera/styles/parallelize.h"

namespace {

using namespace tessera;
using namespace tessera::bench;

constexpr double kMostOfStep = 1.02;
constexpr int kTurns = 10000;

// Returns the nanoseconds of one record and of one turn of an empty loop.
std::pair<Figure, Figure> cost_of_record(int rounds) {
  Recorder recorder(0, 16384);
  std::vector<double> records, turns;
  for (int round = 0; round < rounds; ++round) {
    // The compiler must take each turn to read and write memory, so that it keeps the empty loop.
    records.push_back(1000 * time_calls(
                                 [&] {
                                   const Recorder::Span span(recorder, "aten::mm");
                                   asm volatile("" ::: "memory");
                                 },
                                 kTurns));
    turns.push_back(1000 * time_calls([] { asm volatile("" ::: "memory"); }, kTurns));
  }
  return {figure_of(records), figure_of(turns)};
}

// Holds a training step of a model of `hidden` on rank 0 of two.
class Step {
 public:
  explicit Step(int64_t hidden)
      : world_(World::fake(0, 2)),
        mesh_(init_device_mesh("cpu", {2}, {"tp"}, world_)),
        model_(TransformerOptions{.hidden = hidden, .layers = 2, .dropout = 0}),
        run_(parallelize_module(model_, mesh_,
                                {{"layers.*.attn.w[qkv]", ColwiseParallel()},
                                 {"layers.*.attn.wo", RowwiseParallel()},
                                 {"layers.*.mlp.up", ColwiseParallel()},
                                 {"layers.*.mlp.down", RowwiseParallel()}})),
        optimizer_(model_->parameters()) {}

  void run() {
    const at::Tensor logits = run_(ids_);
    logits.square().mean().backward();
    optimizer_.step();
    optimizer_.zero_grad();
  }
  Recorder& recorder() const { return world_->recorder(); }

 private:
  std::shared_ptr<World> world_;
  DeviceMesh mesh_;
  Transformer model_;
  Parallelized<Transformer> run_;
  torch::optim::AdamW optimizer_;
  const at::Tensor ids_ = torch::arange(4 * 64).remainder(256).view({4, 64});
};

// Returns the times of steps with the recorder on over those with it off; the two alternate. Puts the number of records
// of a step into `records`.
Ratio cost_of_step(int64_t hidden, int rounds, std::size_t& records) {
  Step step(hidden);
  for (int i = 0; i < 5; ++i) step.run();
  step.recorder().restart(16384);
  step.run();
  records = step.recorder().records().size();
  std::vector<double> on, off;
  for (int round = 0; round < rounds; ++round) {
    for (const bool first : {round % 2 == 0, round % 2 != 0}) {
      step.recorder().set_on(first);
      (first ? on : off).push_back(time_calls([&] { step.run(); }, 1));
    }
  }
  return ratio_of(on, off);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What the recorder costs: one record, and its part of a training step");
  int rounds = 801;
  std::vector<int64_t> widths = {64, 256};
  std::string json;
  bool check = false;
  app.add_flag("--check", check, "fail when a goal is missed");
  app.add_option("--rounds", rounds, "rounds; each has one step with the recorder and one without")
      ->check(CLI::PositiveNumber);
  app.add_option("--hidden", widths, "the model's sizes")->check(CLI::PositiveNumber);
  app.add_option("--json", json, "write the figures to this file too");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  try {
    const auto [record, turn] = cost_of_record(rounds);
    fmt::print("a record {:.1f} ns (quartiles {:.1f} to {:.1f}), a turn of an empty loop {:.1f} ns\n", record.median,
               record.low, record.high, turn.median);
    nlohmann::json rows = {{{"name", "record"}, {"ns", record.median}, {"empty_loop_ns", turn.median}}};
    std::vector<Goal> goals;
    for (const int64_t hidden : widths) {
      std::size_t records = 0;
      const Ratio ratio = cost_of_step(hidden, rounds, records);
      const std::string name = fmt::format("a step of hidden size {} with {} records", hidden, records);
      fmt::print("{}: {} times the step without\n", name, to_string(ratio));
      nlohmann::json row = {{"name", fmt::format("step_{}", hidden)}, {"records", records}};
      put(row, "on_over_off", ratio);
      rows.push_back(std::move(row));
      goals.push_back(
          {fmt::format("{}: at most {}: {:.3f}", name, kMostOfStep, ratio.median), ratio.median <= kMostOfStep});
    }
    const bool met = print_goals(goals);
    if (!json.empty()) write_json(json, "recorder", rows);
    if (check && !met) return 1;
  } catch (const std::exception& error) {
    std::cerr << "recorder: " << error.what() << "\n";
    return 1;
  }
  return 0;
}

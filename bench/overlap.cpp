// Measures how much of the input gradient's reduction overlaps with the computation of the weight's gradient: it runs a
// step of a linear layer over a group that adds a given delay.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/block.h"
#include "tessera/bench/measure.h"
#include "tessera/bench/paired.h"
#include "tessera/bench/two_sides.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/delayed_group.h"

namespace {

using namespace tessera;
using namespace tessera::bench;

constexpr double kMost = 1.10;

struct Sizes {
  int64_t ranks = 2;
  int64_t tokens = 512;
  int64_t in = 1024;
  int64_t out = 4096;  // summed over the ranks
  int rounds = 51;
};

// Runs a step of one layer, whose input is an operator's result, as in a model.
struct Step {
  at::Tensor x;
  at::Tensor gradient;
  std::vector<at::Tensor> parameters;
  std::function<at::Tensor(const at::Tensor&)> forward;

  void run() {
    x.mutable_grad().reset();
    for (const at::Tensor& each : parameters) each.mutable_grad().reset();
    forward(x).backward(gradient);
  }
};

Step by_layers(const Sizes& sizes, const DeviceMesh& mesh) {
  ColumnParallelLinear layer(ColumnParallelOptions(sizes.in, sizes.out), mesh);
  return {.x = numbers({sizes.tokens, 1, sizes.in}, 1, 1).requires_grad_(),
          .gradient = numbers({sizes.tokens, 1, sizes.out / sizes.ranks}, 2, 1),
          .parameters = layer->parameters(),
          .forward = [layer](const at::Tensor& x) mutable { return layer->forward(x.neg()); }};
}

Step by_styles(const Sizes& sizes, const DeviceMesh& mesh) {
  torch::nn::Linear layer(sizes.in, sizes.out);
  auto tp = parallelize_module(layer, mesh, ColwiseParallel(), {.src_rank = kNoSource});
  return {.x = from_local(numbers({sizes.tokens, 1, sizes.in}, 1, 1), mesh, {Replicate()}).requires_grad_(),
          .gradient = from_local(numbers({sizes.tokens, 1, sizes.out / sizes.ranks}, 2, 1), mesh, {Shard(2)}),
          .parameters = layer->parameters(),
          .forward = [tp](const at::Tensor& x) mutable { return tp(x.neg()); }};
}

// Holds the times of all rounds, each of which measures a step without a delay, a step with a delay, and the weight's
// gradient alone.
struct Times {
  std::vector<double> compute, weight_gradient, step;
};

struct OverlapRow {
  std::string way;
  double share = 0;  // the delay divided by the weight gradient's time
  double delay = 0;  // in microseconds, like the figures below
  Figure compute, weight_gradient, step;
  Ratio of_longer;  // the step's time over the longer of computation and delay
};

// Returns the time of the slowest rank, on every rank.
double slowest_of(double mine, const DeviceMesh& mesh) {
  return all_reduce(at::full({1}, mine, at::kDouble), mesh, 0, ReduceOp::kMax).item<double>();
}

OverlapRow measure(const std::string& way, double share, const Sizes& sizes) {
  OverlapRow row{.way = way, .share = share};
  std::atomic<int64_t> delay{0};
  const tessera::testing::DelayedOptions options{.delay = [&](int64_t bytes) {
    return std::chrono::microseconds(bytes > 1024 ? delay.load() : 0);  // none for the reductions of figures
  }};
  tessera::testing::run_delayed(sizes.ranks, options, [&](const std::shared_ptr<World>& world) {
    at::set_num_threads(1);
    const DeviceMesh mesh = init_device_mesh("cpu", {sizes.ranks}, {"tp"}, world);
    Step step = way == "layers" ? by_layers(sizes, mesh) : by_styles(sizes, mesh);
    const at::Tensor g = numbers({sizes.tokens, sizes.out / sizes.ranks}, 2, 1),
                     x = numbers({sizes.tokens, sizes.in}, 1, 1);
    const auto timed = [&](int64_t wanted, const std::function<void()>& body) {
      barrier(mesh, 0);
      if (world->rank() == 0) delay = wanted;
      barrier(mesh, 0);
      const double mine = time_calls(body, 1);
      barrier(mesh, 0);
      return slowest_of(mine, mesh);
    };
    const auto plain_step = [&] { return timed(0, [&] { step.run(); }); };
    const auto weight_gradient = [&] { return timed(0, [&] { at::mm(g.t(), x); }); };
    std::vector<double> first;
    for (int i = 0; i < 5; ++i) plain_step(), first.push_back(weight_gradient());
    const double wanted = share * figure_of(first).median;
    Times times;
    std::vector<double> longer;
    for (int round = 0; round < sizes.rounds; ++round) {
      times.compute.push_back(plain_step());
      times.step.push_back(timed(static_cast<int64_t>(wanted), [&] { step.run(); }));
      times.weight_gradient.push_back(weight_gradient());
      longer.push_back(std::max(times.compute.back(), wanted));
    }
    if (world->rank() != 0) return;
    row.delay = wanted;
    row.compute = figure_of(times.compute);
    row.weight_gradient = figure_of(times.weight_gradient);
    row.step = figure_of(times.step);
    row.of_longer = ratio_of(times.step, longer);
  });
  return row;
}

void print_row(const OverlapRow& row) {
  fmt::print("{:<10}{:>8.2f}{:>12.0f}{:>14.0f}{:>12.0f}{:>12.0f}{:>28}\n", row.way, row.share, row.delay,
             row.weight_gradient.median, row.compute.median, row.step.median, to_string(row.of_longer));
  std::fflush(stdout);
}

nlohmann::json json_of(const OverlapRow& row) {
  nlohmann::json out = {{"name", fmt::format("{}, delay {:.2f}", row.way, row.share)},
                        {"way", row.way},
                        {"delay_us", row.delay},
                        {"weight_gradient_us", row.weight_gradient.median},
                        {"compute_us", row.compute.median},
                        {"step_us", row.step.median}};
  put(out, "step_to_longer", row.of_longer);
  return out;
}

bool run(const Sizes& sizes, const std::vector<double>& shares, const std::string& json, bool check) {
  fmt::print("{} ranks\n{:<10}{:>8}{:>12}{:>14}{:>12}{:>12}{:>28}\n", sizes.ranks, "us", "share", "delay",
             "weight's grad.", "no delay", "step", "step / the longer");
  std::vector<Goal> goals;
  nlohmann::json rows = nlohmann::json::array();
  for (const std::string way : {"layers", "styles"}) {
    for (const double share : shares) {
      const OverlapRow row = measure(way, share, sizes);
      print_row(row);
      rows.push_back(json_of(row));
      goals.push_back(
          {fmt::format("{}, a delay of {:.2f} of the weight gradient: at most {} of the longer of computation and "
                       "communication: {}",
                       way, share, kMost, to_string(row.of_longer)),
           row.of_longer.median <= kMost});
    }
  }
  const bool met = print_goals(goals);
  if (!json.empty()) write_json(json, "overlap", rows);
  return met || !check;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("How much of the input gradient's reduction overlaps with computing the weight's gradient");
  Sizes sizes;
  std::vector<double> shares = {0.5, 0.9};
  std::string json;
  bool check = false, quick = false;
  app.add_option("--ranks", sizes.ranks, "threads of this process")->check(CLI::PositiveNumber);
  app.add_option("--tokens", sizes.tokens, "rows of the input")->check(CLI::PositiveNumber);
  app.add_option("--in", sizes.in, "input features")->check(CLI::PositiveNumber);
  app.add_option("--out", sizes.out, "output features; the ranks divide them")->check(CLI::PositiveNumber);
  app.add_option("--shares", shares, "delays, divided by the time of the weight's gradient")->delimiter(',');
  app.add_option("--rounds", sizes.rounds, "rounds")->check(CLI::PositiveNumber);
  app.add_option("--json", json, "write the figures to this file too");
  app.add_flag("--check", check, "fail when a goal is missed");
  app.add_flag("--quick", quick, "small sizes and few rounds, whatever is given, to see whether it runs");
  CLI11_PARSE(app, argc, argv);
  if (quick) sizes = {.tokens = 32, .in = 64, .out = 128, .rounds = 2};
  return run_main("overlap", [&] { return run(sizes, shares, json, check); });
}

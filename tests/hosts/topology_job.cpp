// Is a rank of a job on two hosts of two ranks, for topology_test. It measures the mesh {host: 2, tp: 2}, looks for
// redistributions whose plans under the measured costs are others than under the default ones, which are those of one
// host, lists some of them, spread over all, and times both plans of these. Rank 0 prints what it finds, one line for
// each pair, and last the mean and the median of the ratios of the times, and their sums.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/measured_costs.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/planner/plan_redistribute.h"

using namespace tessera;

namespace {

constexpr int64_t kRows = 1024, kColumns = 1024;
constexpr std::size_t kTimed = 24;
constexpr int kRepeats = 5;

struct Pair {
  Placements from, to;
  Plan uniform, measured;
};

// Returns each layout once.
std::vector<Placements> layouts() {
  const std::vector<Placement> each = {Replicate(), Shard(0), Shard(1), Partial()};
  std::vector<Placements> all;
  for (const Placement& on_host : each) {
    for (const Placement& on_tp : each) all.push_back({on_host, on_tp});
  }
  for (const int64_t d : {0, 1}) all.push_back({Shard(d).ordered(1), Shard(d)});
  return all;
}

// Figures of time aside, says whether two plans take the same steps.
bool are_same_steps(const Plan& a, const Plan& b) {
  return std::ranges::equal(a.steps(), b.steps(), [](const PlanStep& one, const PlanStep& other) {
    return one.kind == other.kind && one.mesh_dims == other.mesh_dims && one.to == other.to;
  });
}

std::string steps_of(const Plan& plan) {
  std::string text;
  for (const PlanStep& step : plan.steps()) {
    text += fmt::format("{}{} on", text.empty() ? "" : ", ", to_string(step.kind));
    for (const int64_t mesh_dim : step.mesh_dims) {
      text += " " + plan.mesh().mesh_dim_name(mesh_dim);
    }
  }
  return text;
}

std::vector<Pair> differing_pairs(const DeviceMesh& mesh, const CostModel& costs, int64_t& all) {
  std::vector<Pair> pairs;
  for (const Placements& from : layouts()) {
    for (const Placements& to : layouts()) {
      if (from == to) continue;
      const auto plan = [&](const CostModel& model) {
        return plan_redistribute({kRows, kColumns}, at::kFloat, mesh.mesh(), from, to, model);
      };
      Pair pair{from, to, plan(CostModel::gloo(2)), plan(costs)};
      ++all;
      if (!are_same_steps(pair.uniform, pair.measured)) pairs.push_back(std::move(pair));
    }
  }
  return pairs;
}

// Returns at most so many of the pairs, at equal distances.
std::vector<Pair> spread(const std::vector<Pair>& pairs, std::size_t most) {
  const std::size_t count = std::min(pairs.size(), most);
  std::vector<Pair> out;
  for (std::size_t i = 0; i < count; ++i) out.push_back(pairs[i * pairs.size() / count]);
  return out;
}

// Returns the milliseconds of the slowest rank.
double time_of(const at::Tensor& source, const Placements& to, const CostModel& model, const DeviceMesh& mesh) {
  for (int64_t d = 0; d < mesh.ndim(); ++d) barrier(mesh, d);
  const auto start = std::chrono::steady_clock::now();
  redistribute(source, to, {.cost_model = model});
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  at::Tensor slowest = at::full({1}, took.count(), at::kDouble);
  for (int64_t d = 0; d < mesh.ndim(); ++d) slowest = all_reduce(slowest, mesh, d, ReduceOp::kMax);
  return slowest.item<double>();
}

void run() {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"host", "tp"});
  const bool is_first = mesh.world().rank() == 0;
  const CostModel costs = measured_costs(mesh);
  int64_t all = 0;
  const std::vector<Pair> differing = differing_pairs(mesh, costs, all);
  const std::vector<Pair> pairs = spread(differing, kTimed);
  if (is_first) {
    fmt::print("costs: {}\n", costs.to_string());
    fmt::print("bandwidths: {} {}\n", costs.links[0].bytes_per_microsecond, costs.links[1].bytes_per_microsecond);
    fmt::print("differ: {} of {}\n", differing.size(), all);
    for (const Pair& pair : pairs) {
      fmt::print("will time: {} -> {}: {}; {}\n", to_string(pair.from), to_string(pair.to), steps_of(pair.uniform),
                 steps_of(pair.measured));
    }
  }
  const at::Tensor whole = distribute_tensor(at::ones({kRows, kColumns}), mesh, {Replicate(), Replicate()}, kNoSource);
  double uniform_sum = 0, measured_sum = 0;
  std::vector<double> ratios;
  for (const Pair& pair : pairs) {
    const at::Tensor source = redistribute(whole, pair.from);
    double uniform = std::numeric_limits<double>::infinity(), measured = uniform;
    for (int j = 0; j < kRepeats; ++j) {
      uniform = std::min(uniform, time_of(source, pair.to, CostModel::gloo(2), mesh));
      measured = std::min(measured, time_of(source, pair.to, costs, mesh));
    }
    uniform_sum += uniform;
    measured_sum += measured;
    ratios.push_back(uniform / measured);
    if (!is_first) continue;
    fmt::print("pair: {} -> {}: {:.2f} ms by {}; {:.2f} ms by {}; ratio {:.2f}\n", to_string(pair.from),
               to_string(pair.to), uniform, steps_of(pair.uniform), measured, steps_of(pair.measured),
               uniform / measured);
  }
  if (!is_first) return;
  const at::Tensor all_ratios = at::tensor(ratios, at::kDouble);
  fmt::print("timed, slower: {} {}\n", ratios.size(), std::ranges::count_if(ratios, [](double r) { return r < 0.95; }));
  fmt::print("mean, median: {:.2f} {:.2f}\n", all_ratios.mean().item<double>(), all_ratios.median().item<double>());
  fmt::print("geometric mean: {:.2f}\n", std::exp(all_ratios.log().mean().item<double>()));
  fmt::print("sums: {:.0f} {:.0f}\n", uniform_sum, measured_sum);
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    fmt::print("error: {}\n", error.what());
    return 1;
  }
  return 0;
}

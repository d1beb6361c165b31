#include "tessera/bench/plan_optimum.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iostream>

#include <fmt/format.h>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/tests/harness/brute_force.h"

namespace tessera::bench {
namespace {

// Returns whether the planned time equals `microseconds` up to rounding: the plan rounds each step's bytes to a whole
// number.
bool equal(const Plan& plan, const CostModel& model, double microseconds) {
  double slack = 1e-6 + 1e-6 * microseconds;
  for (const PlanStep& step : plan.steps()) {
    if (step.max_bytes > 0) slack += 1 / model.over(step.mesh_dims).bytes_per_microsecond;
  }
  return std::abs(plan.microseconds() - microseconds) <= slack;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', '|');
  return text;
}

// Returns what is wrong with our plan for one pair, or "".
std::string judge(brute::BruteForce& optimum_of, const Sizes& shape, const Mesh& mesh, const Pair& pair,
                  const NamedModel& by, Quality& quality) {
  const auto& [from, to] = pair;
  const Plan plan = plan_redistribute(shape, at::kFloat, mesh, from, to, by.model);
  const brute::Optimum optimum = optimum_of.cheapest(from, to, by.model);
  const bool bytes_only = by.name == "bytes_only";
  quality.to_optimum.add(plan.microseconds(), optimum.microseconds);
  double peak = 0;
  for (const brute::Leg& leg : optimum.legs) peak = std::max(peak, leg.step.live);
  quality.peak_to_optimum.add(static_cast<double>(plan.peak_bytes()), peak);
  quality.above_limit += static_cast<double>(plan.peak_bytes()) > optimum_of.live_limit(from, to);

  const std::string plans = fmt::format("ours {}; best {}", one_line(plan.to_string()), brute::to_string(optimum));
  const std::string objection = optimum_of.objection(plan, from, to);
  if (!objection.empty()) return fmt::format("unsound: {}; {}", objection, plans);
  if (!equal(plan, by.model, optimum.microseconds)) {
    return fmt::format("{}: {}", plan.microseconds() > optimum.microseconds ? "more expensive" : "cheaper", plans);
  }
  if (!bytes_only) return "";
  const LowerBound bound = lower_bound(shape, at::kFloat, mesh, from, to);
  if (any_partial(from) || any_partial(to)) {
    const bool sound = static_cast<double>(bound.max_bytes) <= optimum.microseconds + 1;
    return sound ? "" : fmt::format("lower_bound says {}: {}", bound.max_bytes, plans);
  }
  quality.to_bound.add(static_cast<double>(plan.max_bytes()), static_cast<double>(bound.max_bytes));
  const LowerBound counted = optimum_of.missing(from, to);
  if (bound.max_bytes != counted.max_bytes || bound.total_bytes != counted.total_bytes) {
    return fmt::format("lower_bound says {} and {}, but {} and {} were counted", bound.max_bytes, bound.total_bytes,
                       counted.max_bytes, counted.total_bytes);
  }
  return plan.max_bytes() == bound.max_bytes ? "" : fmt::format("above the lower bound {}: {}", bound.max_bytes, plans);
}

}  // namespace

std::vector<Quality> measure_quality(const Mesh& mesh, const Sizes& shape, std::size_t most, int examples) {
  const auto all = layouts(
      mesh, shape, [&](int64_t ranks) { return all_choices(ranks, shape); }, joint_layouts(mesh, shape));
  brute::BruteForce optimum_of(shape, at::kFloat, mesh);
  std::vector<Quality> out;
  for (const NamedModel& by : models(mesh)) {
    out.push_back({.mesh = mesh.to_string(), .shape = fmt::format("{}x{}", shape[0], shape[1]), .model = by.name});
  }
  for (const Pair& pair : pairs(all, most, 1)) {
    std::size_t row = 0;
    for (const NamedModel& by : models(mesh)) {
      Quality& quality = out[row++];
      ++quality.pairs;
      std::string wrong;
      try {
        wrong = judge(optimum_of, shape, mesh, pair, by, quality);
      } catch (const std::exception& error) {
        wrong = fmt::format("threw: {}", error.what());
      }
      if (wrong.empty()) continue;
      wrong = fmt::format("{} -> {}: {}", to_string(pair.first), to_string(pair.second), wrong);
      if (quality.off++ < examples) {
        std::cerr << fmt::format("OFF mesh {} shape {} by {}: {}\n", quality.mesh, quality.shape, quality.model, wrong);
      }
      if (quality.first_off.empty()) quality.first_off = wrong;
    }
  }
  return out;
}

}  // namespace tessera::bench

// Compares plans with the cheapest ones that an exhaustive search finds, which shares no code with the planner.
// tools/bench plan_quality compares more.

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/placement/layout.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/tests/harness/brute_force.h"

using namespace tessera;

namespace {

using Shape = std::vector<int64_t>;

// Cuts along the first mesh dimension; the second and the last part have the most elements.
Placement ragged(const Mesh& mesh, const Shape& shape) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(mesh.size(0)), 0);
  sizes[1] = std::min<int64_t>(shape[1], 2);
  sizes.back() += shape[1] - sizes[1];
  return RaggedShard(1, sizes);
}

// Draws a layout from most kinds of placements; nullopt if the placements are no layout.
std::optional<Placements> draw(const Mesh& mesh, const Shape& shape, std::mt19937& random) {
  const Placements kinds = {Replicate(),
                            Shard(0),
                            Shard(1),
                            Shard(0).ordered(1),
                            Shard(1).ordered(2),
                            Partial(),
                            BlockCyclic(0, 2),
                            ragged(mesh, shape),
                            Partial(ReduceOp::kMax),
                            Partial(ReduceOp::kAvg)};
  Placements out;
  for (int64_t i = 0; i < mesh.ndim(); ++i) out.push_back(kinds[random() % kinds.size()]);
  out = normalize(out, mesh, 2, "test");
  return is_layout(out, mesh, shape) && partials_commute(out) ? std::optional(out) : std::nullopt;
}

// The first link is the slowest of all, or the fastest.
CostModel graded(int64_t ndim, double microseconds, double bytes_per_microsecond, bool first_is_slowest) {
  CostModel out;
  for (int64_t i = 0; i < ndim; ++i) {
    const auto grade = static_cast<double>(first_is_slowest ? ndim - i : i + 1);
    out.links.push_back({microseconds * grade, bytes_per_microsecond / grade});
  }
  return out;
}

// Returns the time that rounding may add, since plans count whole bytes.
double rounding(const Plan& plan, const CostModel& model) {
  double out = 1e-6 * (1 + plan.microseconds());
  for (const PlanStep& step : plan.steps()) {
    if (step.max_bytes > 0) out += 1 / model.over(step.mesh_dims).bytes_per_microsecond;
  }
  return out;
}

void check_pairs(const Mesh& mesh, const Shape& shape, int pairs) {
  std::mt19937 random(20260103);
  brute::BruteForce optimum_of(shape, at::kFloat, mesh);
  const std::vector<CostModel> models = {CostModel::bytes_only(mesh.ndim()), CostModel::gloo(mesh.ndim()),
                                         graded(mesh.ndim(), 10, 10, true), graded(mesh.ndim(), 0.001, 10, false)};
  for (int done = 0; done < pairs;) {
    const auto from = draw(mesh, shape, random);
    const auto to = draw(mesh, shape, random);
    if (!from || !to) continue;
    ++done;
    for (const CostModel& model : models) {
      const Plan plan = plan_redistribute(shape, at::kFloat, mesh, *from, *to, model);
      const brute::Optimum optimum = optimum_of.cheapest(*from, *to, model);
      const std::string what = to_string(*from) + " -> " + to_string(*to) + " by " + model.to_string() + "\n" +
                               plan.to_string() + "\nbest " + brute::to_string(optimum);
      CAPTURE(what);
      CHECK(optimum_of.objection(plan, *from, *to) == "");
      CHECK(std::abs(plan.microseconds() - optimum.microseconds) <= rounding(plan, model));
      const LowerBound bound = lower_bound(shape, at::kFloat, mesh, *from, *to);
      CHECK(bound.max_bytes <= plan.max_bytes());
    }
  }
}

}  // namespace

TEST_CASE("no sequence of steps is cheaper than the plan") {
  check_pairs(Mesh({2, 2}), {4, 8}, 60);
  check_pairs(Mesh({2, 2}), {5, 7}, 60);
  check_pairs(Mesh({3, 2}), {6, 5}, 40);
  check_pairs(Mesh({2, 2, 2}), {8, 8}, 25);
  check_pairs(Mesh({2, 2, 2}), {5, 7}, 25);
}

TEST_CASE("nor on a mesh of more ranks than the search compares") {
  check_pairs(Mesh({9, 8}), {16, 32}, 12);
  check_pairs(Mesh({9, 8}), {20, 9}, 12);
  check_pairs(Mesh({65}), {130, 3}, 12);
}

#include "tessera/placement/plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/placement/layout.h"

using namespace tessera;

namespace {

using Shape = std::vector<int64_t>;

const Placement S0 = Shard(0);
const Placement S1 = Shard(1);
const Placement S2 = Shard(2);
const Placement R = Replicate();
const Placement P = Partial();

int64_t collectives(const Plan& plan) {
  return std::count_if(plan.begin(), plan.end(), [](const PlanStep& step) { return communicates(step); });
}

int64_t collectives(const Placements& from, const Placements& to, const Shape& mesh) {
  return collectives(plan_redistribute(from, to, mesh));
}

// Every list of `n` of the placements.
std::vector<Placements> all_layouts(std::size_t n, const Placements& kinds) {
  std::vector<Placements> out = {{}};
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<Placements> longer;
    for (const Placements& start : out) {
      for (const Placement& kind : kinds) {
        longer.push_back(start);
        longer.back().push_back(kind);
      }
    }
    out = std::move(longer);
  }
  return out;
}

// Chunks nest in the order of mesh dimensions: a step that makes, takes or moves chunks of tensor dimension d on one mesh
// dimension is right only while no mesh dimension inside it holds chunks of d.
bool splits_inside(const Placements& now, const PlanStep& step, const Shape& mesh) {
  for (std::size_t i = static_cast<std::size_t>(step.mesh_dim) + 1; i < now.size(); ++i) {
    if (mesh[i] == 1 || !now[i].is_shard()) continue;
    if (step.from == now[i] || step.to == now[i]) return true;
  }
  return false;
}

void check_plan(const Placements& from, const Placements& to, const Shape& mesh) {
  CAPTURE(to_string(from));
  CAPTURE(to_string(to));
  Placements now = from;
  for (const PlanStep& step : plan_redistribute(from, to, mesh)) {
    const auto i = static_cast<std::size_t>(step.mesh_dim);
    CHECK(now[i] == step.from);
    CHECK(step.from != step.to);
    CHECK(mesh[i] > 1);
    CHECK_FALSE(splits_inside(now, step, mesh));
    CHECK((!step.to.is_partial() || step.from.is_replicate()));
    now[i] = step.to;
  }
  for (std::size_t i = 0; i < now.size(); ++i) CHECK((mesh[i] == 1 || now[i] == to[i]));
}

}  // namespace

TEST_CASE("one mesh dimension: what runs follows from the pair") {
  struct Row {
    Placement from;
    Placement to;
    std::string want;
  };
  const std::vector<Row> rows = {
      {R, R, "nothing to do"},
      {S0, S0, "nothing to do"},
      {P, P, "nothing to do"},
      {R, S0, "slice on tp: R -> S(0)"},
      {R, P, "to_partial on tp: R -> P(sum)"},
      {S0, R, "all_gather on tp: S(0) -> R"},
      {S0, S1, "all_to_all on tp: S(0) -> S(1)"},
      {S0, P, "all_gather on tp: S(0) -> R; to_partial on tp: R -> P(sum)"},
      {P, R, "all_reduce on tp: P(sum) -> R"},
      {P, S1, "reduce_scatter on tp: P(sum) -> S(1)"},
      {P, Partial(ReduceOp::kMax), "all_reduce on tp: P(sum) -> R; to_partial on tp: R -> P(max)"},
  };
  for (const Row& row : rows) {
    const Plan plan = plan_redistribute({row.from}, {row.to}, Shape{4});
    CHECK(to_string(plan, {"tp"}) == row.want);
    CHECK(communicates(plan) == !(row.from == row.to || row.from.is_replicate()));
    CHECK(plan_redistribute({row.from}, {row.to}, Shape{1}).empty());
  }
  CHECK(to_string(plan_redistribute({S0}, {R}, Shape{4})) == "all_gather on 0: S(0) -> R");
}

TEST_CASE("steps lead from the one layout to the other and never break the nesting of chunks") {
  const Placements kinds = {S0, S1, R, P, Partial(ReduceOp::kMax)};
  for (const Shape& mesh : {Shape{3}, Shape{2, 2}, Shape{1, 3}, Shape{2, 1}}) {
    const auto layouts = all_layouts(mesh.size(), kinds);
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) check_plan(from, to, mesh);
    }
  }
  const auto layouts = all_layouts(3, {S0, S1, R, P});
  for (const Shape& mesh : {Shape{2, 2, 2}, Shape{1, 2, 2}}) {
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) check_plan(from, to, mesh);
    }
  }
}

TEST_CASE("two mesh dimensions: at most the collectives of PyTorch's planner") {
  struct Row {
    Placements from;
    Placements to;
    int64_t most;
  };
  const std::vector<Row> rows = {
      {{S0, S1}, {S0, S0}, 1}, {{S0, S1}, {S1, S0}, 2}, {{S0, S1}, {S1, S1}, 2}, {{S0, S0}, {S1, S1}, 2},
      {{S0, S2}, {S1, S0}, 2}, {{S1, S1}, {S1, S2}, 1}, {{S0, S0}, {R, S0}, 2},  {{P, S0}, {P, S1}, 1},
  };
  for (const Row& row : rows) {
    CAPTURE(to_string(row.from));
    CAPTURE(to_string(row.to));
    CHECK(collectives(row.from, row.to, {2, 2}) <= row.most);
  }
}

TEST_CASE("three mesh dimensions: at most the collectives of PyTorch's planner") {
  struct Row {
    Placements from;
    Placements to;
    int64_t most;
  };
  const std::vector<Row> rows = {
      {{S0, S0, S0}, {S1, S1, S1}, 3},
      {{S0, S1, S2}, {S2, S1, S0}, 2},
      {{S1, S0, S0}, {R, S0, S0}, 1},
      {{S0, S0, S1}, {S0, S1, S2}, 2},
  };
  for (const Row& row : rows) {
    CAPTURE(to_string(row.from));
    CAPTURE(to_string(row.to));
    CHECK(collectives(row.from, row.to, {2, 2, 2}) <= row.most);
  }
}

TEST_CASE("mesh dimensions of size 1 change for nothing") {
  const auto layouts = all_layouts(2, {S0, S1, R, P});
  for (const Placements& from : layouts) {
    for (const Placement& to : {S0, S1, R}) {
      CAPTURE(to_string(from));
      CHECK(plan_redistribute(from, {from[0], to}, Shape{4, 1}).empty());
    }
  }
}

TEST_CASE("what does not communicate costs nothing, and more bytes cost more") {
  const PlanStep gather{.mesh_dim = 0, .from = S0, .to = R};
  CHECK(estimated_microseconds({.mesh_dim = 0, .from = R, .to = S0}, 1e9, 4) == 0);
  CHECK(estimated_microseconds(gather, 2e6, 4) > estimated_microseconds(gather, 1e6, 4));
  CHECK(estimated_microseconds({.mesh_dim = 0, .from = P, .to = R}, 1e6, 4) > estimated_microseconds(gather, 1e6, 4));
  CHECK(estimated_microseconds({.mesh_dim = 0, .from = S0, .to = S1}, 1e6, 4) < estimated_microseconds(gather, 1e6, 4));
}

#include "tessera/placement/plan.h"
#include "tessera/placement/exchange.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/planner/layout_space.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/placement/planner/step_costs.h"
#include "tessera/tests/placement/short_names.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;
using namespace tessera::testing;

namespace {

using Shape = std::vector<int64_t>;

const Mesh kLine({4}, {"tp"});
const Mesh kGrid({2, 2}, {"dp", "tp"});

Plan bytes_plan(const Placements& from, const Placements& to, const Mesh& mesh, const Shape& shape = {8, 8}) {
  return plan_redistribute(shape, at::kFloat, mesh, from, to, CostModel::bytes_only(mesh.ndim()));
}

// Returns e.g. "all_gather on dp+tp; local".
std::string outline(const Plan& plan) {
  std::string out;
  for (const PlanStep& step : plan.steps()) {
    out += out.empty() ? "" : "; ";
    out += to_string(step.kind);
    for (const int64_t d : step.mesh_dims) out += " " + plan.mesh().names()[static_cast<std::size_t>(d)];
  }
  return out;
}

// Returns every list of `n` of the placements in which pending reductions commute.
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
  std::erase_if(out, [](const Placements& p) { return !partials_commute(p); });
  return out;
}

}  // namespace

TEST_CASE("one mesh dimension: what runs follows from the pair") {
  struct Row {
    Placement from;
    Placement to;
    std::string want;
  };
  const std::vector<Row> rows = {
      {R, R, ""},
      {S0, S0, ""},
      {P, P, ""},
      {R, S0, "local"},
      {R, P, "local"},
      {S0, P, "local"},
      {S0, R, "all_gather tp"},
      {S0, S1, "all_to_all tp"},
      {S0, BlockCyclic(0, 1), "all_to_all tp"},
      {S0, RaggedShard(0, {5, 1, 0, 2}), "all_to_all tp"},
      {RaggedShard(0, {5, 1, 0, 2}), RaggedShard(0, {5, 0, 1, 2}), "permute tp"},
      {S0, BlockCyclic(0, 2), ""},
      {P, R, "all_reduce tp"},
      {P, S1, "reduce_scatter tp"},
      // If it were reduced to the pieces directly, every rank would receive as much as the rank with the largest piece.
      {P, RaggedShard(1, {5, 1, 0, 2}), "reduce_scatter tp; all_to_all tp"},
      {P, Partial(ReduceOp::kMax), "reduce_scatter tp; local"},
      {P, Partial(ReduceOp::kAvg), "local"},  // every rank scales its piece
      {Partial(ReduceOp::kAvg), P, "local"},
      {NormPartial(2), R, "all_reduce tp"},
      {MaskedPartial(), R, "all_reduce tp"},
      {MaskedPartial(), P, ""},
      {P, MaskedPartial(), ""},
  };
  for (const Row& row : rows) {
    CAPTURE(to_string(row.from));
    CAPTURE(to_string(row.to));
    const Plan plan = bytes_plan({row.from}, {row.to}, kLine);
    // A change without communication may still be a step that renames the layout.
    const std::string got = row.want.empty() && !plan.communicates() ? "" : outline(plan);
    CHECK(got == row.want);
  }
}

TEST_CASE("without a pending reduction no rank receives what it has, nor anything twice, and once is enough") {
  const std::vector<Placements> line_layouts =
      all_layouts(1, {R, S0, S1, BlockCyclic(0, 2), RaggedShard(0, {1, 4, 0, 2}), BlockCyclic(1, 1)});
  const Placement ragged = RaggedShard(0, {1, 4, 0, 2});
  std::vector<Placements> grid_layouts = all_layouts(2, {R, S0, S1, BlockCyclic(0, 2)});
  grid_layouts.push_back({ragged, ragged});
  grid_layouts.push_back({ragged.ordered(1), ragged});
  grid_layouts.push_back({S0.ordered(1), S0});
  for (const bool grid : {false, true}) {
    const Mesh& mesh = grid ? kGrid : kLine;
    const auto& layouts = grid ? grid_layouts : line_layouts;
    for (const Shape& shape : {Shape{7, 5}, Shape{7, 8}, Shape{7, 1}}) {
      for (const Placements& from : layouts) {
        for (const Placements& to : layouts) {
          CAPTURE(to_string(from));
          CAPTURE(to_string(to));
          const Plan plan = bytes_plan(from, to, mesh, shape);
          const LowerBound bound = lower_bound(shape, at::kFloat, mesh, from, to);
          CHECK(plan.max_bytes() == bound.max_bytes);
          CHECK(plan.total_bytes() == bound.total_bytes);
          CHECK(plan.steps().size() <= 1);
        }
      }
    }
  }
}

TEST_CASE("what ranks send and receive agrees, and no copy of an element sends more than its share") {
  const Shape shape = {7, 5};
  const auto layouts = all_layouts(2, {R, S0, S1, BlockCyclic(1, 2)});
  int64_t compared = 0;
  for (const Placements& from : layouts) {
    for (const Placements& to : layouts) {
      CAPTURE(to_string(from));
      CAPTURE(to_string(to));
      const Plan plan = bytes_plan(from, to, kGrid, shape);
      if (plan.steps().size() != 1 || !plan.communicates() || plan.steps()[0].mesh_dims.size() != 2) continue;
      std::vector<Splits> splits;
      for (int64_t rank = 0; rank < 4; ++rank) splits.push_back(plan.splits(rank)[0]);
      for (std::size_t a = 0; a < 4; ++a) {
        for (std::size_t b = 0; b < 4; ++b) CHECK(splits[a].send[b] == splits[b].receive[a]);
      }
      ++compared;
    }
  }
  CHECK(compared >= 9);  // this many layouts cut twice and are gathered
  // Each half of the rows is held by two ranks and needed by two others: each holder sends to one of them.
  const Plan plan = bytes_plan({S0, R}, {R, S0}, kGrid, {8, 4});
  int64_t most = 0;
  for (int64_t rank = 0; rank < 4; ++rank) {
    const std::vector<Splits> splits = plan.splits(rank);
    for (const int64_t sent : splits[0].send) most = std::max(most, sent);
  }
  CHECK(most == 16);
}

TEST_CASE("pending reductions over several mesh dimensions: together, or the small one last") {
  CHECK(outline(bytes_plan({P, P}, {R, R}, kGrid)) == "all_reduce dp tp");
  CHECK(bytes_plan({P, P}, {R, R}, kGrid).max_bytes() == 384);  // 2 * 256 * 3 / 4
  CHECK(outline(bytes_plan({P, P}, {S0, S1}, kGrid)) == "reduce_scatter dp tp");
  const Mesh wide({8, 8}, {"dp", "tp"});
  const Plan plan = bytes_plan({P, P}, {R, S0}, wide, {64, 64});
  CHECK(static_cast<double>(plan.max_bytes()) / (64 * 64 * 4) < 1.1);  // all_reduce dp, then reduce_scatter tp: 2.63
  const Placement avg = Partial(ReduceOp::kAvg);
  CHECK(outline(bytes_plan({P, avg}, {avg, P}, kGrid)) == "local");
  CHECK(outline(bytes_plan({P, P}, {avg, S0}, kGrid)) == "local; reduce_scatter tp");
  CHECK(outline(bytes_plan({P, avg}, {R, R}, kGrid)) == "all_reduce dp tp");
  CHECK(outline(bytes_plan({NormPartial(2), NormPartial(2)}, {R, R}, kGrid)) == "all_reduce dp tp");
}

TEST_CASE("halves are not multiplied by a number of ranks, since they might overflow") {
  const Placement avg = Partial(ReduceOp::kAvg);
  const auto half = [&](const Placement& from, const Placement& to) {
    return outline(plan_redistribute({16, 16}, at::kHalf, kLine, {from}, {to}, CostModel::bytes_only(1)));
  };
  CHECK(half(S0, P) == "local");
  CHECK(half(S0, avg) == "all_gather tp; local");
  CHECK(half(P, avg) == "all_reduce tp; local");
  CHECK(half(avg, P) == "reduce_scatter tp; local");
  CHECK(half(R, avg) == "local");
  CHECK(outline(bytes_plan({S0}, {avg}, kLine)) == "local");
}

TEST_CASE("the lower bound where reductions are pending") {
  struct Row {
    Placements from;
    Placements to;
    int64_t max_bytes;
    int64_t total_bytes;
  };
  // The tensor has 64 elements of 4 bytes, on 2 x 2 ranks.
  const std::vector<Row> rows = {
      // Four terms are sent to one of four ranks in 3 messages, and the value to the others in 3 more.
      {{P, P}, {R, R}, 384, 1536},
      // In each of two slices one of two terms is sent.
      {{P, P}, {S0, P}, 128, 512},
      // No rank along the replicated mesh dimension has the others' terms, so all four are sent.
      {{P, P}, {R, P}, 256, 1024},
      // Both terms are sent of the half of the elements that change ranks.
      {{P, S0}, {P, S1}, 64, 256},
      // A value is sent to the ranks that need the piece that depends on it.
      {{S0, R}, {R, P}, 64, 256},
      {{R, R}, {P, R}, 0, 0},
      {{S0, R}, {P, R}, 0, 0},
      {{P, R}, {P, R}, 0, 0},
  };
  for (const Row& row : rows) {
    CAPTURE(to_string(row.from));
    CAPTURE(to_string(row.to));
    const LowerBound bound = lower_bound({8, 8}, at::kFloat, kGrid, row.from, row.to);
    CHECK(bound.max_bytes == row.max_bytes);
    CHECK(bound.total_bytes == row.total_bytes);
    CHECK(bytes_plan(row.from, row.to, kGrid).max_bytes() == bound.max_bytes);
  }
  CHECK_THROWS_WITH_AS(lower_bound({8}, at::kFloat, kLine, {S1}, {R}),
                       doctest::Contains("lower_bound: S(1) is outside a tensor of 1 dimensions"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(lower_bound({8}, at::kFloat, kLine, {R}, {RaggedShard(0, {1, 2})}),
                       doctest::Contains("lower_bound"), std::invalid_argument);
}

TEST_CASE("a layout on the way may cut in an order that neither end has") {
  // The reduced mesh dimension cuts each rank's own terms last; then the pieces are exchanged.
  const Plan plan = bytes_plan({P, S0}, {S0, R}, kGrid, {64});
  REQUIRE(plan.steps().size() == 2);
  CHECK(plan.steps()[0].to == Placements{S0.ordered(1), S0});
}

TEST_CASE("where links differ, the slow one carries the least") {
  const Mesh mesh({2, 4}, {"host", "gpu"});
  const CostModel model = CostModel::nvlink_infiniband(mesh, 4);
  CHECK(model.links[0].bytes_per_microsecond < model.links[1].bytes_per_microsecond);
  const auto plan = [&](const Shape& shape, const Placements& from, const Placements& to) {
    return outline(plan_redistribute(shape, at::kFloat, mesh, from, to, model));
  };
  // For a large tensor a GPU gets only its part of the columns from the other host, and then NVLink gathers. A small
  // one takes one step.
  CHECK(plan({1 << 12, 1 << 12}, {S0, R}, {R, R}) == "all_to_all host; all_gather gpu");
  CHECK(plan({4, 4}, {S0, R}, {R, R}) == "all_gather host");
  // Here it gets its part of the columns from the GPUs of both hosts.
  CHECK(plan({1 << 12, 1 << 12}, {S0, S0}, {R, R}) == "all_to_all host gpu; all_gather gpu");
}

TEST_CASE("where links differ, only what ranks of different hosts send each other crosses the slow one") {
  const Mesh mesh({2, 2}, {"host", "tp"});
  const CostModel model{.links = {{.microseconds = 400, .bytes_per_microsecond = 32},
                                  {.microseconds = 150, .bytes_per_microsecond = 2048}}};
  const auto plan = [&](const Placements& from, const Placements& to) {
    return plan_redistribute({1024, 1024}, at::kFloat, mesh, from, to, model);
  };
  // A rank receives a quarter of its 1 MiB from each other rank, of which two are on the other host.
  CHECK(outline(plan({S0, S0}, {S1, S1})) == "all_to_all host tp");
  CHECK(plan({S0, S0}, {S1, S1}).microseconds() == doctest::Approx(400 + (1 << 19) / 32. + (1 << 18) / 2048.));
  // One rank of each host receives all of its 4 KiB from the other host, and shares the link with one that receives
  // none.
  const Plan exchange = plan_redistribute({64, 64}, at::kFloat, mesh, {S0, S1}, {S1, S0}, model);
  CHECK(outline(exchange) == "permute host tp");
  CHECK(exchange.microseconds() == doctest::Approx(400 + 2048 / 32. + 2048 / 2048.));
  // A reduction goes by hosts first: each rank receives 2 MiB from the other host, and not 4.
  CHECK(outline(plan({P, P}, {R, R})) == "reduce_scatter tp; all_reduce host; all_gather tp");
  CHECK(plan({P, P}, {R, R}).microseconds() == doctest::Approx(2 * (150 + (1 << 21) / 2048.) + 400 + (1 << 21) / 32.));
  // A small tensor takes one step, in which a rank receives 8 KiB from the other host and 4 from its own.
  const Plan small = plan_redistribute({2048}, at::kFloat, mesh, {P, P}, {R, R}, model);
  CHECK(outline(small) == "all_reduce host tp");
  CHECK(small.microseconds() == doctest::Approx(400 + 8192 / 32. + 4096 / 2048.));
}

TEST_CASE("a step that takes as long as the bound is known by that to be the best, to the last bit") {
  // The order in which three terms are added decides the last bit of their sum.
  const std::vector<std::pair<std::vector<int64_t>, CostModel>> rows = {
      {{2, 8}, {.links = {{0.001, 100}, {0.001, 10}}}},
      {{2, 2, 2}, {.links = {{0.3, 3}, {0.3, 7}, {0.3, 11}}}},
  };
  for (const auto& [mesh_shape, model] : rows) {
    const Placements from(mesh_shape.size(), S0), to(mesh_shape.size(), S1);
    for (int64_t n = 1; n < 40; ++n) {
      const Shape shape = {128 * n, 64 * (n + 3)};
      LayoutSpace space(shape, mesh_shape, from, to, /*sample=*/true);
      StepCosts costs(space, at::kFloat, model);
      const auto step = costs.step(space.from(), space.to(), std::numeric_limits<double>::infinity());
      REQUIRE(step.has_value());
      CHECK(step->microseconds == costs.bound(space.from()));
    }
  }
}

TEST_CASE("where links differ, the time of a step follows from what every rank receives from every other") {
  // Returns the time by Plan::splits.
  const auto time_of = [](const Plan& plan, std::size_t step, const CostModel& model) {
    const Mesh& mesh = plan.mesh();
    const MergedDims group(mesh.shape(), plan.steps()[step].mesh_dims);
    uint32_t over = 0;
    for (const int64_t d : group.mesh_dims()) over |= uint32_t{1} << d;
    return model.microseconds(over, [&](uint32_t slow) {
      std::map<std::vector<int64_t>, std::vector<int64_t>> by_group;  // what its ranks receive
      for (const int64_t rank : mesh.ranks()) {
        const std::vector<int64_t> mine = *mesh.coordinate_of(rank);
        const Splits splits = plan.splits(rank)[step];
        int64_t received = 0;
        for (int64_t member = 0; member < group.size(); ++member) {
          const std::vector<int64_t> other = group.coordinate_of(mine, member);
          bool differs = false;
          for (std::size_t d = 0; d < mine.size(); ++d) differs |= (slow >> d & 1) != 0 && other[d] != mine[d];
          if (differs) received += splits.receive[static_cast<std::size_t>(member)];
        }
        std::vector<int64_t> agreeing = mine;
        for (std::size_t d = 0; d < mine.size(); ++d) agreeing[d] = (slow >> d & 1) != 0 ? mine[d] : -1;
        by_group[agreeing].push_back(received);
      }
      double most = 0;
      for (const auto& [group, received] : by_group) {
        const auto all = std::accumulate(received.begin(), received.end(), 0.0);
        most = std::max(most, 4 * all / static_cast<double>(received.size()));
      }
      return most;
    });
  };
  struct Row {
    Mesh mesh;
    CostModel model;
    std::vector<Shape> shapes;
    std::vector<Placements> layouts;
  };
  const Placements kinds = {R, S0, S1, BlockCyclic(0, 2)};
  const CostModel two{.links = {{4, 1}, {1, 8}}}, three{.links = {{4, 1}, {1, 8}, {2, 3}}};
  const std::vector<Row> rows = {
      {kGrid, two, {{8, 8}, {7, 5}}, all_layouts(2, kinds)},
      {Mesh({3, 2}, {"host", "tp"}), two, {{6, 6}, {7, 5}}, all_layouts(2, kinds)},
      {Mesh({2, 2, 2}, {"a", "b", "c"}), three, {{8, 8}}, all_layouts(3, {R, S0, S1})},
      // Not all ranks of these are compared.
      {Mesh({12, 8}, {"host", "tp"}), two, {{192, 96}, {100, 17}}, {{S0, S0}, {S1, S1}, {S0, S1}, {S1, S0}, {R, R}}},
      {Mesh({16, 8}, {"host", "tp"}), two, {{128, 256}}, {{S0, S0}, {S1, S1}, {S0, S1}, {S1, S0}, {R, R}}},
  };
  int64_t over_several = 0;
  for (const Row& row : rows) {
    for (const Shape& shape : row.shapes) {
      for (const Placements& from : row.layouts) {
        for (const Placements& to : row.layouts) {
          CAPTURE(to_string(from));
          CAPTURE(to_string(to));
          const Plan plan = plan_redistribute(shape, at::kFloat, row.mesh, from, to, row.model);
          CAPTURE(plan.to_string());
          for (std::size_t i = 0; i < plan.steps().size(); ++i) {
            if (plan.splits(row.mesh.ranks()[0])[i].receive.empty()) continue;
            CHECK(plan.steps()[i].microseconds == doctest::Approx(time_of(plan, i, row.model)));
            over_several += plan.steps()[i].mesh_dims.size() > 1 ? 1 : 0;
          }
        }
      }
    }
  }
  CHECK(over_several > 100);
}

TEST_CASE("an all_reduce of what its group needs together, where no layout holds just that") {
  // Over a and b, a rank of c needs rows 0, 2, 3 or rows 1, 4: at most three of five.
  const Mesh mesh({2, 2, 2}, {"a", "b", "c"});
  const Placements to = {RaggedShard(0, {2, 3}), R, S0};
  const Plan plan = plan_redistribute({5, 7}, at::kFloat, mesh, {P, P, P}, to, CostModel::nvlink_infiniband(mesh, 2));
  CHECK(outline(plan) == "all_reduce c; all_reduce a b");
  CHECK(plan.steps()[1].max_bytes == 3 * 7 * 4 * 2 * 3 / 4);
  CHECK(plan.steps()[1].to == to);
  CHECK(plan.total_bytes() == 8 * 5 * 7 * 4 + 4 * (3 + 2) * 7 * 4 * 2 * 3 / 4);
}

TEST_CASE("a masked reduction counts as the reduction without its mask") {
  const Placement masked = MaskedPartial(ReduceOp::kMax);
  CHECK(outline(bytes_plan({masked, Partial(ReduceOp::kMax)}, {R, R}, kGrid)) == "all_reduce dp tp");
}

TEST_CASE("a mesh of many dimensions is planned for, by way of fewer layouts") {
  const Mesh cube(Shape(12, 2));
  const Shape shape = {4096, 4096};
  const Plan plan = bytes_plan(Placements(12, P), Placements(12, S0), cube, shape);
  CHECK(plan.communicates());
  for (const PlanStep& step : plan.steps()) CHECK(is_layout(step.to, cube, shape));

  // A pending value that is cut reaches neither Replicate nor Shards in one step.
  Placements cut(12, S0);
  cut[0] = P;
  CHECK((bytes_plan(cut, Placements(12, S1), cube, shape).steps()[0].kind == PlanStep::Kind::kAllReduce));
  Shape sizes(12, 1);
  sizes[11] = 2;
  Placements norms(12, NormPartial(2));
  norms[11] = S0;
  Placements others(12, NormPartial(3));
  others[11] = R;
  const Plan renormed = bytes_plan(norms, others, Mesh(sizes), {8});
  CHECK(renormed.steps().back().to == others);
  CHECK(renormed.max_bytes() == 16);
}

TEST_CASE("a step whose time is no number is not preferred to steps whose is") {
  // The time of half of 4e8 bytes over the first link overflows; that of a quarter, after a slice, does not.
  const CostModel slow{
      .links = {{.microseconds = 0, .bytes_per_microsecond = 1e-300}, {.microseconds = 0, .bytes_per_microsecond = 1}}};
  const Plan plan = plan_redistribute({20000, 5000}, at::kFloat, kGrid, {S0, R}, {R, R}, slow);
  CHECK(plan.microseconds() < std::numeric_limits<double>::infinity());
}

TEST_CASE("a user's partition that cannot cut every size is asked for no layout that it cannot") {
  class Pairs final : public Partition {
   public:
    Pairs() : Partition("Pairs", "") {}
    Intervals part(int64_t size, int64_t parts, int64_t index) const override {
      if (size % (2 * parts) != 0) throw std::runtime_error("an odd size");
      return one_interval(size / parts * index, size / parts * (index + 1));
    }
  };
  const Placement pairs = Shard(0, std::make_shared<const Pairs>());
  CHECK(bytes_plan({pairs, P}, {R, pairs}, kGrid, {4, 3}).communicates());
}

TEST_CASE("mesh dimensions of size 1 change for nothing") {
  const Mesh mesh({4, 1}, {"dp", "tp"});
  for (const Placements& from : all_layouts(2, {S0, S1, R, P})) {
    for (const Placement& to : {S0, S1, R}) {
      CAPTURE(to_string(from));
      CHECK(bytes_plan(from, {from[0], to}, mesh).steps().empty());
    }
  }
  // The norm of one piece is its absolute value.
  CHECK(outline(bytes_plan({R, NormPartial(2)}, {R, R}, mesh)) == "all_reduce tp");
}

TEST_CASE("live bytes stay within the two tiles and two copies of the larger") {
  const auto layouts = all_layouts(2, {R, S0, S1, P});
  for (const CostModel& model : {CostModel::bytes_only(2), CostModel::gloo(2)}) {
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) {
        CAPTURE(to_string(from));
        CAPTURE(to_string(to));
        const Plan plan = plan_redistribute({8, 8}, at::kFloat, kGrid, from, to, model);
        const auto tile = [&](const Placements& p) {
          int64_t most = 0;
          for (int64_t rank = 0; rank < 4; ++rank) {
            int64_t bytes = 4;
            for (const int64_t n : local_shape(Shape{8, 8}, p, kGrid.shape(), *kGrid.coordinate_of(rank))) bytes *= n;
            most = std::max(most, bytes);
          }
          return most;
        };
        CHECK(plan.peak_bytes() <= tile(from) + tile(to) + 2 * std::max(tile(from), tile(to)));
      }
    }
  }
}

TEST_CASE("a plan is a value: printed, compared, hashed") {
  const Plan plan = bytes_plan({S0}, {S1}, kLine);
  CHECK(plan.to_string() == "all_to_all on tp: [S(0)] -> [S(1)], 48 bytes, 48 us");
  CHECK(bytes_plan({S0}, {S0}, kLine).to_string() == "nothing to do");
  CHECK(plan == bytes_plan({S0}, {S1}, kLine));
  CHECK(plan.hash() == bytes_plan({S0}, {S1}, kLine).hash());
  CHECK(plan != bytes_plan({S0}, {S1}, kLine, {8, 4}));
  CHECK(plan != bytes_plan({S1}, {S0}, kLine));
  CHECK(plan.max_bytes() == 48);
  CHECK(plan.total_bytes() == 192);
  CHECK(plan.splits(1)[0] == Splits{.send = {4, 0, 4, 4}, .receive = {4, 0, 4, 4}});
}

TEST_CASE("on large meshes figures are those of all ranks, and no layout on the way loses elements") {
  const Mesh line({128});
  Shape twos(128, 2);
  twos[60] = 3, twos[61] = 1;
  const Plan moved = bytes_plan({S0}, {RaggedShard(0, twos)}, line, {256, 4});
  CHECK(moved.max_bytes() == 16);
  CHECK(moved.max_bytes() == lower_bound({256, 4}, at::kFloat, line, {S0}, {RaggedShard(0, twos)}).max_bytes);
  CHECK(bytes_plan({S0}, {S1}, line, {129, 1000}).max_bytes() ==
        lower_bound({129, 1000}, at::kFloat, line, {S0}, {S1}).max_bytes);

  // BlockCyclic leaves 4 rows to each of 128 ranks, as the sizes do except for two ranks; RS(0,2,2) cannot cut those.
  const Mesh wide({128, 2}, {"host", "gpu"});
  Shape fours(128, 4);
  fours[2] = 5, fours[3] = 3;
  const Plan plan = plan_redistribute({512, 1 << 17}, at::kFloat, wide, {BlockCyclic(0, 1), RaggedShard(0, {2, 2})},
                                      {RaggedShard(0, fours), R}, CostModel::nvlink_infiniband(wide, 2));
  for (const PlanStep& step : plan.steps()) CHECK(is_layout(step.to, wide, Shape{512, 1 << 17}));
}

TEST_CASE("what cannot be planned is refused") {
  const auto refused = [](const Shape& shape, at::ScalarType dtype, const Placements& from, const Placements& to,
                          const CostModel& model, const std::string& part) {
    CAPTURE(part);
    CHECK_THROWS_WITH_AS(plan_redistribute(shape, dtype, kLine, from, to, model), doctest::Contains(part.c_str()),
                         std::invalid_argument);
  };
  refused({8}, at::kFloat, {S0, R}, {R}, {}, "plan_redistribute: 2 placements");
  refused({-8}, at::kFloat, {R}, {P}, {}, "plan_redistribute: a tensor of shape [-8]; give sizes of at least 0");
  refused({1L << 40, 1L << 40}, at::kFloat, {R}, {S0}, {}, "at most 1e+17 elements in all");
  refused({1L << 32, 1L << 32, 0}, at::kFloat, {R}, {S0}, {}, "at most 1e+17 elements in all");
  CHECK_THROWS_WITH_AS(lower_bound({-8}, at::kFloat, kLine, {R}, {P}),
                       doctest::Contains("lower_bound: a tensor of shape [-8]"), std::invalid_argument);
  refused({8}, at::kFloat, {S1}, {R}, {}, "S(1) is outside a tensor of 1 dimensions");
  refused({8}, at::kFloat, {RaggedShard(0, {1, 2})}, {R}, {}, "has 2 parts");
  refused({8}, at::kBool, {P}, {R}, {}, "sum of Bool is not defined");
  refused({8}, at::kLong, {NormPartial(2)}, {R}, {}, "P(norm 2) of Long is not defined");
  refused({8}, at::kFloat, {R}, {Partial(ReduceOp::kBitOr)}, {}, "bit_or of Float is not defined");
  refused({8}, at::kFloat, {R}, {S0}, CostModel::bytes_only(2), "does not fit a mesh of 1 dimensions");
  refused({8}, at::kFloat, {R}, {S0}, {.links = {{.microseconds = -1, .bytes_per_microsecond = 1}}},
          "a latency of at least 0");
  CHECK_THROWS_WITH_AS(plan_redistribute({8}, at::kFloat, kGrid, {P, Partial(ReduceOp::kMax)}, {R, R}),
                       doctest::Contains("two kinds of reductions pending"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(plan_redistribute({8}, at::kFloat, Mesh(Shape(13, 1)), Placements(13), Placements(13)),
                       doctest::Contains("a mesh of 13 dimensions; merge some, at most 12 are planned for"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(to_string(static_cast<PlanStep::Kind>(99)), doctest::Contains("not a kind of step"),
                       std::logic_error);
  CHECK_THROWS_WITH_AS(bytes_plan({S0}, {R}, kLine).splits(9), doctest::Contains("rank 9 is not on the mesh"),
                       std::invalid_argument);
}

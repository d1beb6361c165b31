#include "tessera/inspect/visualize.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/explain.h"
#include "tessera/inspect/layout_grid.h"
#include "tessera/inspect/svg.h"
#include "tessera/placement/planner/plan_redistribute.h"

using namespace tessera;

namespace {

struct Row {
  const char* why;
  std::vector<int64_t> shape;
  Mesh mesh;
  Placements placements;
  const char* want;
};

// A user's partition: even elements first, odd ones second.
class Halves final : public Partition {
 public:
  Halves() : Partition("Halves", "") {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    Intervals out;
    for (int64_t i = index; i < size; i += parts) append(out, {i, i + 1});
    return out;
  }
};

// Returns how many elements the cells have in which `rank` is.
int64_t drawn_for(int64_t rank, const LayoutGrid& grid) {
  int64_t elements = 0;
  for (const LayoutSlice& slice : grid.slices) {
    for (std::size_t i = 0; i < slice.cells.size(); ++i) {
      if (std::ranges::count(slice.cells[i].ranks, rank) == 0) continue;
      std::vector<Interval> box = slice.box;
      if (grid.row_dim >= 0) box[static_cast<std::size_t>(grid.row_dim)] = grid.rows[i / grid.columns.size()];
      if (grid.column_dim >= 0) box[static_cast<std::size_t>(grid.column_dim)] = grid.columns[i % grid.columns.size()];
      int64_t size = 1;
      for (const Interval& part : box) size *= part.size();
      elements += size;
    }
  }
  return elements;
}

int64_t count_of(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("visualize: what each rank holds") {
  const Mesh two({2}, {"tp"}), grid({2, 2}, {"dp", "tp"});
  const std::vector<Row> rows = {
      {"rows are cut", {4, 6}, two, {Shard(0)}, R"([4, 6] on {tp: 2} as [S(0)]
rows are tensor dimension 0, columns tensor dimension 1
      0-6
    +-----+
0-2 | 0   |
    +-----+
2-4 | 1   |
    +-----+
)"},
      {"both are cut, unevenly", {5, 12}, grid, {Shard(0), Shard(1)}, R"([5, 12] on {dp: 2, tp: 2} as [S(0), S(1)]
rows are tensor dimension 0, columns tensor dimension 1
      0-6   6-12
    +-----+------+
0-3 | 0   | 1    |
    +-----+------+
3-5 | 2   | 3    |
    +-----+------+
)"},
      {"copies and terms", {4, 2}, grid, {Replicate(), Partial()}, R"([4, 2] on {dp: 2, tp: 2} as [R, P(sum)]
rows are tensor dimension 0, columns tensor dimension 1
      0-2
    +----------------------+
0-4 | sum(0, 1), sum(2, 3) |
    +----------------------+
)"},
      {"a pending maximum of cut rows",
       {4},
       grid,
       {Shard(0), Partial(ReduceOp::kMax)},
       R"([4] on {dp: 2, tp: 2} as [S(0), P(max)]
columns are tensor dimension 0
   0-2         2-4
 +-----------+-----------+
 | max(0, 1) | max(2, 3) |
 +-----------+-----------+
)"},
      {"empty pieces", {1}, Mesh({3}), {Shard(0)}, R"([1] on (3) as [S(0)]
columns are tensor dimension 0
   0-1
 +-----+
 | 0   |
 +-----+
no elements: rank 1, 2
)"},
      {"blocks, dealt in turn", {5}, two, {BlockCyclic(0, 2)}, R"([5] on {tp: 2} as [BC(0,2)]
columns are tensor dimension 0
   0-2   2-4   4-5
 +-----+-----+-----+
 | 0   | 1   | 0   |
 +-----+-----+-----+
)"},
      {"ragged pieces", {5}, Mesh({3}, {"tp"}), {RaggedShard(0, {1, 0, 4})}, R"([5] on {tp: 3} as [RS(0,1,0,4)]
columns are tensor dimension 0
   0-1   1-5
 +-----+-----+
 | 0   | 2   |
 +-----+-----+
no elements: rank 1
)"},
      {"a user's partition",
       {4},
       two,
       {Shard(0, std::make_shared<const Halves>())},
       R"([4] on {tp: 2} as [Halves(0)]
columns are tensor dimension 0
   0-1   1-2   2-3   3-4
 +-----+-----+-----+-----+
 | 0   | 1   | 0   | 1   |
 +-----+-----+-----+-----+
)"},
      {"slices of a third dimension",
       {2, 2, 4},
       Mesh({2, 1, 2, 2}),
       {Shard(0), Shard(1), Shard(1), Shard(2)},
       R"([2, 2, 4] on (2, 1, 2, 2) as [S(0), S(1), S(1), S(2)]
rows are tensor dimension 1, columns tensor dimension 2
[0-1, :, :]
      0-2   2-4
    +-----+-----+
0-1 | 0   | 1   |
    +-----+-----+
1-2 | 2   | 3   |
    +-----+-----+
[1-2, :, :]
      0-2   2-4
    +-----+-----+
0-1 | 4   | 5   |
    +-----+-----+
1-2 | 6   | 7   |
    +-----+-----+
)"},
      {"the last dimension is cut alone", {3, 2, 4}, two, {Shard(2)}, R"([3, 2, 4] on {tp: 2} as [S(2)]
rows are tensor dimension 1, columns tensor dimension 2
      0-2   2-4
    +-----+-----+
0-2 | 0   | 1   |
    +-----+-----+
)"},
      {"a number", {}, grid, {Replicate(), Replicate()}, R"([] on {dp: 2, tp: 2} as [R, R]
 +------+
 | 0..3 |
 +------+
)"},
      {"no elements", {0, 3}, two, {Shard(0)}, R"([0, 3] on {tp: 2} as [S(0)]
no rank holds an element
)"},
      {"two cuts of one dimension, in the other order",
       {4},
       grid,
       {Shard(0).ordered(1), Shard(0)},
       R"([4] on {dp: 2, tp: 2} as [S(0)@1, S(0)]
columns are tensor dimension 0
   0-1   1-2   2-3   3-4
 +-----+-----+-----+-----+
 | 0   | 2   | 1   | 3   |
 +-----+-----+-----+-----+
)"},
      {"ranks in another order",
       {2},
       Mesh({2}, {"tp"}, {7, 5}),
       {Shard(-1)},
       R"([2] on {tp: 2} over ranks [7, 5] as [S(0)]
columns are tensor dimension 0
   0-1   1-2
 +-----+-----+
 | 7   | 5   |
 +-----+-----+
)"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(visualize(row.shape, row.mesh, row.placements) == row.want);
  }
}

TEST_CASE("visualize: cuts that are too fine are listed") {
  const std::string text = visualize({40}, Mesh({2}, {"tp"}), {BlockCyclic(0, 1)});
  CHECK(text.find("too fine") != std::string::npos);
  CHECK(text.find("\nrank 0: [0-1+2-3+4-5+") != std::string::npos);
  CHECK(text.find("\nrank 1: [1-2+3-4+5-6+") != std::string::npos);
  const std::string many = visualize({200}, Mesh({100}), {Shard(0)});
  CHECK(many.find("\nrank 63: [126-128]\nand those of 36 more ranks\n") != std::string::npos);
}

TEST_CASE("visualize: every element is in the cells of the ranks that hold it, on meshes of any number of dimensions") {
  struct Case {
    std::vector<int64_t> shape;
    Mesh mesh;
    Placements placements;
  };
  const std::vector<Case> cases = {
      {{7, 5}, Mesh({2, 3}), {Shard(1), Shard(0)}},
      {{7, 5}, Mesh({2, 3}), {Shard(0), Shard(0)}},
      {{4, 3, 5}, Mesh({2, 2, 2, 2}), {Shard(0), Replicate(), Shard(2), BlockCyclic(1, 1)}},
      {{3}, Mesh({2, 2, 2}), {Shard(0), Shard(0), Partial()}},
  };
  for (const Case& each : cases) {
    CAPTURE(to_string(each.placements));
    const LayoutGrid grid = layout_grid(each.shape, each.mesh, each.placements);
    REQUIRE_FALSE(grid.too_fine);
    for (const int64_t rank : each.mesh.ranks()) {
      CAPTURE(rank);
      int64_t held = 1;
      for (const int64_t size :
           local_shape(each.shape, each.placements, each.mesh.shape(), *each.mesh.coordinate_of(rank)))
        held *= size;
      CHECK(drawn_for(rank, grid) == held);
    }
  }
}

TEST_CASE("visualize: a layout that does not fit is refused") {
  CHECK_THROWS_WITH_AS(visualize({4}, Mesh({2}), {Shard(1)}), doctest::Contains("visualize"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(visualize({4}, Mesh({2}), {}), doctest::Contains("visualize"), std::invalid_argument);
  CHECK_THROWS_AS(visualize({5}, Mesh({2}), {RaggedShard(0, {1, 3})}), std::invalid_argument);
  CHECK_THROWS_AS(visualize(at::ones({2})), std::invalid_argument);
  CHECK_THROWS_WITH_AS(visualize({-1, 4}, Mesh({2}), {Shard(0)}),
                       doctest::Contains("visualize: the global shape [-1, 4] has a negative size"),
                       std::invalid_argument);
}

TEST_CASE("visualize: a DTensor is drawn alike on every rank") {
  for (int64_t rank = 0; rank < 2; ++rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, World::fake(rank, 2));
    const at::Tensor x = distribute_tensor(at::ones({5}), mesh, {Shard(0)}, kNoSource);
    CHECK(visualize(x) == visualize({5}, Mesh({2}, {"tp"}), {Shard(0)}));
    CHECK(visualize_svg(x) == visualize_svg({5}, Mesh({2}, {"tp"}), {Shard(0)}));
  }
}

TEST_CASE("visualize: a plan is drawn before, between its steps and after") {
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, World::fake(0, 2));
  const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)}, kNoSource);
  const Plan plan = explain(x, {Shard(1)}).plan;
  REQUIRE(plan.steps().size() == 1);
  CHECK(visualize(plan) == "before: " + visualize({4, 6}, Mesh({2}, {"tp"}), {Shard(0)}) + "\nstep 1: " +
                               plan.to_string() + "\n\nafter: " + visualize({4, 6}, Mesh({2}, {"tp"}), {Shard(1)}));
  CHECK(plan.to_string().starts_with("all_to_all on tp: [S(0)] -> [S(1)], 24 bytes"));
  CHECK(visualize(explain(x, {Shard(0)}).plan) == "nothing to do\n");

  const Plan two(Mesh({2, 2}), {4}, at::kFloat,
                 {{.kind = PlanStep::Kind::kLocal,
                   .mesh_dims = {0},
                   .from = {Replicate(), Partial()},
                   .to = {Shard(0), Partial()}},
                  {.kind = PlanStep::Kind::kAllReduce,
                   .mesh_dims = {1},
                   .from = {Shard(0), Partial()},
                   .to = {Shard(0), Replicate()},
                   .max_bytes = 8}});
  const std::string text = visualize(two);
  CHECK(text.find("before: [4] on (2, 2) as [R, P(sum)]\n") == 0);
  CHECK(text.find("\n\nafter step 1: [4] on (2, 2) as [S(0), P(sum)]\n") != std::string::npos);
  CHECK(text.find("\nstep 2: all_reduce on 1: [S(0), P(sum)] -> [S(0), R], 8 bytes") != std::string::npos);
  CHECK(text.find("\n\nafter: [4] on (2, 2) as [S(0), R]\n") != std::string::npos);
}

TEST_CASE("visualize_svg: a cell has a stripe for each rank that holds it") {
  const std::string cut = visualize_svg({4, 6}, Mesh({2}, {"tp"}), {Shard(0)});
  CHECK(cut.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  CHECK(cut.ends_with("</svg>\n"));
  CHECK(count_of(cut, "fill=\"hsl(") == 2);
  CHECK(cut.find(">[4, 6] on {tp: 2} as [S(0)]</text>") != std::string::npos);
  const std::string pending = visualize_svg({4, 6}, Mesh({2, 2}), {Shard(0), Partial()});
  CHECK(count_of(pending, "fill=\"hsl(") == 4);
  CHECK(count_of(pending, "stroke-dasharray") == 2);
  CHECK(pending.find(">sum(2, 3)</text>") != std::string::npos);
  const std::string many = visualize_svg({4}, Mesh({16}), {Replicate()});
  CHECK(count_of(many, "fill=\"hsl(") == 0);
  CHECK(many.find(">0..15</text>") != std::string::npos);
}

TEST_CASE("visualize_svg: a plan has its layouts and steps") {
  const Plan plan = plan_redistribute({4, 6}, at::kFloat, Mesh({2}, {"tp"}), {Partial()}, {Shard(0)});
  const std::string svg = visualize_svg(plan);
  REQUIRE(plan.steps().size() == 1);
  CHECK(svg.find(">[4, 6] on {tp: 2} as [P(sum)]</text>") != std::string::npos);
  CHECK(svg.find(">reduce_scatter on tp: [P(sum)] -&gt; [S(0)], ") != std::string::npos);
  CHECK(svg.find(">[4, 6] on {tp: 2} as [S(0)]</text>") != std::string::npos);
}

TEST_CASE("svg: texts are written as XML, and near colours differ") {
  CHECK(xml_text("a<b>&\"c\"") == "a&lt;b&gt;&amp;&quot;c&quot;");
  CHECK(xml_text("\u00e4\n\t") == "\u00e4\n\t");
  // Parsers of XML refuse a whole picture for one of these.
  CHECK(xml_text("a\xffz") == "a\ufffdz");
  CHECK(xml_text(std::string("\x01\x1b\r\0", 4)) == "\ufffd\ufffd\ufffd\ufffd");
  CHECK(xml_text("a\uffff\ufffe") == "a\ufffd\ufffd");
  CHECK(svg_color(0) == "hsl(205,70%,80%)");
  CHECK(svg_color(1) != svg_color(0));
}

TEST_CASE("layout_grid: runs of ranks are shortened") {
  CHECK(ranks_text({}) == "");
  CHECK(ranks_text({4}) == "4");
  CHECK(ranks_text({0, 1}) == "0, 1");
  CHECK(ranks_text({0, 1, 2, 5, 7, 8, 9, 10}) == "0..2, 5, 7..10");
  CHECK(ranks_text({3, 2, 1}) == "3, 2, 1");
}

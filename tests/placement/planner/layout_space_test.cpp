#include "tessera/placement/planner/layout_space.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/placement/short_names.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;
using namespace tessera::testing;

namespace {

using Sizes = std::vector<int64_t>;

std::set<std::string> texts(const Sizes& shape, const Sizes& mesh_shape, const Placements& from, const Placements& to) {
  LayoutSpace space(shape, mesh_shape, from, to, /*sample=*/true);
  space.grow();
  std::set<std::string> out;
  for (LayoutSpace::Node node = 0; node < space.size(); ++node) {
    const Placements placements = space.placements_of(node);
    CHECK(normalize(placements, Mesh(mesh_shape), static_cast<int64_t>(shape.size()), "test") == placements);
    CHECK(out.insert(to_string(placements)).second);
  }
  return out;
}

// Holds a way to cut by some mesh dimensions, as a sequence of them and as its number in the table.
struct Way {
  Sizes sequence;
  int number = 0;
};
void add_ways(CutTable& table, const Way& way, std::size_t mesh_ndim, std::vector<Way>& out) {
  out.push_back(way);
  for (std::size_t i = 0; i < mesh_ndim; ++i) {
    if (std::ranges::find(way.sequence, static_cast<int64_t>(i)) != way.sequence.end()) continue;
    Way longer{way.sequence, table.extended(way.number, i, 1)};
    longer.sequence.push_back(static_cast<int64_t>(i));
    add_ways(table, longer, mesh_ndim, out);
  }
}

// Returns which elements of a dimension each rank holds if the mesh dimensions of `sequence` cut it in turn.
std::vector<std::set<int64_t>> held(int64_t size, const Sizes& sequence, const ComparedRanks& ranks) {
  std::vector<std::set<int64_t>> out;
  for (const Sizes& at : ranks.coordinates) {
    Interval part{.begin = 0, .end = size};
    for (const int64_t i : sequence) {
      const auto d = static_cast<std::size_t>(i);
      const Interval chunk = chunk_range(part.size(), ranks.mesh_shape[d], at[d]);
      part = {.begin = part.begin + chunk.begin, .end = part.begin + chunk.end};
    }
    std::set<int64_t>& mine = out.emplace_back();
    for (int64_t i = part.begin; i < part.end; ++i) mine.insert(i);
  }
  return out;
}

// Says whether the ranks that agree in all coordinates but those of `mesh_dims` together hold what each of them needs.
bool enough(const std::vector<std::set<int64_t>>& have, const std::vector<std::set<int64_t>>& need, uint32_t mesh_dims,
            const ComparedRanks& ranks) {
  for (std::size_t r = 0; r < need.size(); ++r) {
    std::set<int64_t> found;
    for (std::size_t other = 0; other < have.size(); ++other) {
      if (ranks.first_of_group(r, mesh_dims) == ranks.first_of_group(other, mesh_dims)) {
        found.insert(have[other].begin(), have[other].end());
      }
    }
    if (!std::ranges::includes(found, need[r])) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("layouts on the way: every choice of every mesh dimension, in every order of cuts, each once") {
  // Each of 2 mesh dimensions has R, S(0) or S(1), which makes 9; two of these have another order of cuts.
  const std::set<std::string> all = texts({4, 4}, {2, 2}, {S0, R}, {R, S0});
  CHECK(all.size() == 11);
  CHECK(all.contains("[S(0)@1, S(0)]"));
  CHECK(all.contains("[S(1)@1, S(1)]"));
  // With 3 mesh dimensions there are 27. If all 3 cut one tensor dimension there are 5 more orders; if 2 do, 1 more.
  const std::set<std::string> three = texts({8, 8}, {2, 2, 2}, {S0, S0, S0}, {R, R, R});
  CHECK(three.size() == 27 + 2 * 5 + 2 * 3 * 2);
  CHECK(three.contains("[S(0)@2, S(0), S(0)@1]"));
  // The placements of source and target are included; reductions that do not commute are not pending together.
  CHECK(texts({4, 4}, {2}, {BlockCyclic(0, 1)}, {P}) ==
        std::set<std::string>{"[BC(0,1)]", "[P(sum)]", "[R]", "[S(0)]", "[S(1)]"});
  CHECK_FALSE(texts({4, 4}, {2, 2}, {P, R}, {R, Partial(ReduceOp::kMax)}).contains("[P(sum), P(max)]"));
  CHECK(texts({4, 4}, {2, 2}, {P, R}, {R, Partial(ReduceOp::kAvg)}).contains("[P(sum), P(avg)]"));
  // A partition of a fixed number of parts fits if several mesh dimensions have it together.
  const Placement ragged = RaggedShard(0, {1, 0, 1, 2});
  const std::set<std::string> joint = texts({4, 1}, {2, 2}, {ragged, ragged}, {R, R});
  CHECK(joint.contains("[RS(0,1,0,1,2)@1, RS(0,1,0,1,2)]"));
  CHECK_FALSE(joint.contains("[RS(0,1,0,1,2), R]"));
}

TEST_CASE("where all orders would be too many layouts, cuts are in the order of the mesh") {
  const Placements from(7, S0);
  const Placements to(7, R);
  const Sizes mesh_shape(7, 2);
  const std::set<std::string> all = texts({128, 128}, mesh_shape, from, to);
  CHECK(all.size() == 2187);                                                               // 3 ^ 7
  CHECK(texts({64, 64}, Sizes(6, 2), Placements(6, S0), Placements(6, R)).size() == 729);  // 3 ^ 6
}

TEST_CASE("where these would be too many too, a mesh dimension has a placement of the ends, or Replicate") {
  const std::set<std::string> all = texts({256, 256}, Sizes(8, 2), Placements(8, P), Placements(8, S0));
  CHECK(all.size() == 6561);  // 3 ^ 8
  CHECK_FALSE(all.contains("[S(1), R, R, R, R, R, R, R]"));
}

namespace {

// Is a sum of the pieces that a user reduces as a product of terms.
class SumByProduct final : public Reduction {
 public:
  SumByProduct() : Reduction("sum by product", ReduceOp::kProduct) {}
  std::optional<double> slope(int64_t /*ranks*/) const override { return 1; }
};

}  // namespace

TEST_CASE("linear reductions become one another, and are reduced together where their terms are added") {
  const Sizes shape = {4, 4}, mesh_shape = {2, 2};
  const Placement product = Partial(std::make_shared<const SumByProduct>());
  const auto together = [&](const Placement& a, const Placement& b) {
    const LayoutSpace space(shape, mesh_shape, {a, b}, {R, R}, /*sample=*/true);
    return space.reduce_together(space.from(), 0b11);
  };
  CHECK(together(P, Partial(ReduceOp::kAvg)));
  CHECK(together(product, product));
  CHECK_FALSE(together(P, product));
  const LayoutSpace space(shape, mesh_shape, {P, R}, {product, R}, /*sample=*/true);
  CHECK(space.rescaled(space.from(), space.to()) == 0b01);
}

TEST_CASE("the fewest mesh dimensions along which ranks find what they need") {
  const Sizes mesh_shape = {2, 3, 2};
  const ComparedRanks ranks(mesh_shape);
  const std::vector<Placements> choices(3, {R, S0});
  for (const int64_t size : {24, 7}) {  // parts are all equal, or not
    CutTable table(0, size, ranks, choices);
    std::vector<Way> ways;
    add_ways(table, {}, 3, ways);
    CHECK(ways.size() == 16);
    for (const Way& from : ways) {
      for (const Way& to : ways) {
        CAPTURE(size);
        const auto have = held(size, from.sequence, ranks);
        const auto need = held(size, to.sequence, ranks);
        const uint32_t found = table.pair(from.number, to.number).needs;
        CHECK(enough(have, need, found, ranks));
        for (uint32_t fewer = 0; fewer < 8; ++fewer) {
          if (std::popcount(fewer) < std::popcount(found)) CHECK_FALSE(enough(have, need, fewer, ranks));
        }
      }
    }
  }
}

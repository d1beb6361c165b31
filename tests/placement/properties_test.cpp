// Checks properties that hold for any layouts of any tensor on any mesh.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/placement/exchange.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/tests/placement/any_layout.h"

using namespace tessera;
using namespace tessera::testing;
using Shape = std::vector<int64_t>;

namespace {

// Returns every index below `shape`, the last dimension varying fastest.
std::vector<Shape> indices(const Shape& shape) {
  std::vector<Shape> out = {{}};
  for (const int64_t size : shape) {
    std::vector<Shape> longer;
    for (const Shape& start : out) {
      for (int64_t i = 0; i < size; ++i) {
        longer.push_back(start);
        longer.back().push_back(i);
      }
    }
    out = std::move(longer);
  }
  return out;
}

bool holds_element(const Tile& tile, const Shape& index) {
  for (std::size_t d = 0; d < tile.size(); ++d) {
    const auto has = [&](const Interval& part) { return part.begin <= index[d] && index[d] < part.end; };
    if (std::ranges::none_of(tile[d], has)) return false;
  }
  return true;
}

// Says whether intervals ascend, none is empty, and no two overlap or touch.
bool is_set(const Intervals& intervals) {
  int64_t after = -1;
  for (const Interval& each : intervals) {
    if (each.begin <= after || each.end <= each.begin) return false;
    after = each.end;
  }
  return true;
}

// Says whether the coordinate is 0 on all mesh dimensions that do not cut.
bool stands_for_copies(const Shape& coordinate, const Placements& placements) {
  for (std::size_t i = 0; i < coordinate.size(); ++i) {
    if (!placements[i].is_shard() && coordinate[i] != 0) return false;
  }
  return true;
}

bool pending(const Change& change) { return any_partial(change.from) || any_partial(change.to); }

}  // namespace

TEST_CASE("the tiles of the ranks hold every element once, and again on each mesh dimension that does not cut") {
  check_property([] {
    const Change change = *any_change();
    std::vector<Tile> tiles;
    for (const Shape& coordinate : indices(change.mesh_shape)) {
      const Tile tile = local_tile(change.shape, change.from, change.mesh_shape, coordinate);
      for (const Intervals& each : tile) RC_ASSERT(is_set(each));
      Shape first = coordinate;
      for (std::size_t i = 0; i < first.size(); ++i) first[i] = change.from[i].is_shard() ? first[i] : 0;
      RC_ASSERT(tile == local_tile(change.shape, change.from, change.mesh_shape, first));
      if (stands_for_copies(coordinate, change.from)) tiles.push_back(tile);
    }
    for (const Shape& index : indices(change.shape)) {
      RC_ASSERT(std::ranges::count_if(tiles, [&](const Tile& tile) { return holds_element(tile, index); }) == 1);
    }
  });
}

TEST_CASE("without a pending reduction a plan is one step that moves as many bytes as any must") {
  check_property([] {
    const Change change = *any_change();
    RC_PRE(!pending(change));
    const Mesh mesh(change.mesh_shape);
    const Plan plan = plan_redistribute(change.shape, change.dtype, mesh, change.from, change.to);
    const LowerBound bound = lower_bound(change.shape, change.dtype, mesh, change.from, change.to);
    RC_ASSERT(plan.max_bytes() == bound.max_bytes);
    RC_ASSERT(plan.total_bytes() == bound.total_bytes);
    RC_ASSERT(plan.steps().size() <= 1U);
  });
}

TEST_CASE("no plan moves fewer bytes than it must, and each step starts where the one before it ended") {
  check_property([] {
    const Change change = *any_change();
    const Mesh mesh(change.mesh_shape);
    const Plan plan = plan_redistribute(change.shape, change.dtype, mesh, change.from, change.to);
    const LowerBound bound = lower_bound(change.shape, change.dtype, mesh, change.from, change.to);
    RC_ASSERT(plan.max_bytes() >= bound.max_bytes);
    RC_ASSERT(plan.total_bytes() >= bound.total_bytes);
    for (std::size_t i = 1; i < plan.steps().size(); ++i) RC_ASSERT(plan.steps()[i].from == plan.steps()[i - 1].to);
  });
}

TEST_CASE("what a rank sends another is what that one expects of it") {
  check_property([] {
    const Change change = *any_change();
    const Mesh mesh(change.mesh_shape);
    const Plan plan = plan_redistribute(change.shape, change.dtype, mesh, change.from, change.to);
    std::vector<std::vector<Splits>> splits;  // [rank][step]
    for (int64_t rank = 0; rank < mesh.size(); ++rank) splits.push_back(plan.splits(rank));
    for (std::size_t step = 0; step < plan.steps().size(); ++step) {
      const MergedDims group(change.mesh_shape, plan.steps()[step].mesh_dims);
      for (std::size_t rank = 0; rank < splits.size(); ++rank) {
        const Shape here = *mesh.coordinate_of(static_cast<int64_t>(rank));
        const auto me = static_cast<std::size_t>(group.index_of(here));
        const Shape members = mesh.ranks_over(plan.steps()[step].mesh_dims, here);
        for (std::size_t i = 0; i < splits[rank][step].send.size(); ++i) {
          const auto peer = static_cast<std::size_t>(members[i]);
          RC_ASSERT(splits[rank][step].send[i] == splits[peer][step].receive[me]);
        }
      }
    }
  });
}

TEST_CASE("a placement's text says it") {
  check_property([] {
    const Placement placement = *any_placement();
    RC_ASSERT(parse_placement(to_string(placement)) == placement);
    const Change change = *any_change();
    RC_ASSERT(parse_placements(to_string(change.from)) == change.from);
  });
}

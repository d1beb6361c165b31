#include "tessera/placement/tile_layout.h"

#include <doctest/doctest.h>

#include "tessera/tests/placement/any_layout.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Sizes = std::vector<int64_t>;

std::vector<Tile> tiles_of(const Sizes& shape, const Sizes& mesh_shape, const Placements& placements) {
  std::vector<Tile> out;
  const Mesh mesh(mesh_shape);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    out.push_back(local_tile(shape, placements, mesh_shape, *mesh.coordinate_of(rank)));
  }
  return out;
}

std::string text(const std::optional<Placements>& placements) { return placements ? to_string(*placements) : "none"; }

}  // namespace

TEST_CASE("the plainest placements that say the tiles are found") {
  const auto found = [](const Sizes& shape, const Sizes& mesh_shape, const Placements& placements) {
    return text(layout_of_tiles(shape, mesh_shape, tiles_of(shape, mesh_shape, placements)));
  };
  CHECK(found({8, 5}, {2}, {Shard(0)}) == "[S(0)]");
  CHECK(found({8, 5}, {2}, {RaggedShard(0, {4, 4})}) == "[S(0)]");
  CHECK(found({8, 5}, {2}, {RaggedShard(0, {3, 5})}) == "[RS(0,3,5)]");
  CHECK(found({8, 5}, {2}, {RaggedShard(1, {5, 0})}) == "[RS(1,5,0)]");
  CHECK(found({8, 5}, {2}, {BlockCyclic(0, 2)}) == "[BC(0,2)]");
  CHECK(found({8, 5}, {2}, {IntervalShard(0, {{{0, 2}, {4, 6}}, {{2, 4}, {6, 8}}})}) == "[BC(0,2)]");
  CHECK(found({8, 5}, {2}, {IntervalShard(0, {{{0, 1}, {4, 6}}, {{1, 4}, {6, 8}}})}) == "[IS(0,0-1+4-6,1-4+6-8)]");
  CHECK(found({8, 5}, {2, 2}, {Shard(0), Shard(0)}) == "[S(0), S(0)]");
  CHECK(found({5, 8}, {2, 2}, {Shard(0), Shard(0)}) == "[S(0), S(0)]");
  CHECK(found({8, 5}, {2, 3}, {Shard(0).ordered(1), Shard(0)}) == "[S(0)@1, S(0)]");
  CHECK(found({8, 5}, {2, 2}, {Shard(1), Shard(0)}) == "[S(1), S(0)]");
  CHECK(found({8, 5}, {2, 2}, {Shard(1), BlockCyclic(0, 1)}) == "[S(1), BC(0,1)]");
  CHECK(found({8, 5}, {1, 2}, {Shard(1), Shard(0)}) == "[S(0), S(0)]");
  CHECK(found({0, 5}, {2}, {Shard(1)}) == "[S(1)]");
  CHECK(found({0, 5}, {2}, {Shard(0)}) == "[S(0)]");
}

TEST_CASE("tiles that no Shards say are told apart") {
  const Tile all = {{{0, 4}}, {{0, 4}}};
  const Tile corner = {{{0, 2}}, {{0, 2}}};
  const Tile none = {{}, {}};
  // One rank holds everything.
  CHECK(text(layout_of_tiles(Sizes{4, 4}, Sizes{3}, {none, all, none})) == "[RS(0,0,4,0)]");
  // A corner and the opposite corner are no cut of one dimension.
  CHECK(text(layout_of_tiles(Sizes{4, 4}, Sizes{2}, {corner, {{{2, 4}}, {{2, 4}}}})) == "none");
  // Elements are held twice, or by no rank.
  CHECK(text(layout_of_tiles(Sizes{4, 4}, Sizes{2}, {all, all})) == "none");
  CHECK(text(layout_of_tiles(Sizes{4, 4}, Sizes{2}, {corner, none})) == "none");
  // A 0-dimensional tensor cannot be cut.
  CHECK(text(layout_of_tiles(Sizes{}, Sizes{2}, {Tile{}, Tile{}})) == "none");
  CHECK(text(layout_of_tiles(Sizes{}, Sizes{}, {Tile{}})) == "[]");
  // Three of four corners are held.
  const std::vector<Tile> corners = {corner, {{{0, 2}}, {{2, 4}}}, {{{2, 4}}, {{0, 2}}}, none};
  CHECK(text(layout_of_tiles(Sizes{4, 4}, Sizes{2, 2}, corners)) == "none");
}

TEST_CASE("any layout of Shards is found again from its tiles") {
  check_property([] {
    const Change change = *any_change();
    std::vector<int64_t> mesh_shape;
    Placements cuts;
    for (std::size_t i = 0; i < change.from.size(); ++i) {
      if (!change.from[i].is_shard()) continue;
      mesh_shape.push_back(change.mesh_shape[i]);
      cuts.push_back(change.from[i]);
    }
    if (mesh_shape.empty()) return;
    const std::vector<Tile> tiles = tiles_of(change.shape, mesh_shape, cuts);
    const auto found = layout_of_tiles(change.shape, mesh_shape, tiles);
    RC_ASSERT(found.has_value());
    RC_ASSERT(tiles_of(change.shape, mesh_shape, *found) == tiles);
    RC_ASSERT(normalize(*found, Mesh(mesh_shape), static_cast<int64_t>(change.shape.size()), "test") == *found);
  });
}

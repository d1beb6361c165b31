#include "tessera/ops/rules/view_tiles.h"

#include <random>

#include <doctest/doctest.h>

using namespace tessera;
using namespace tessera::rules;

namespace {

using Sizes = std::vector<int64_t>;

std::string text(const std::optional<Tile>& tile) {
  if (!tile) return "none";
  std::string out;
  for (const Intervals& part : *tile) out += to_string(part) + " ";
  return out;
}

// Returns the elements of a tile of a tensor of `sizes`, row-major.
std::vector<int64_t> elements(const Tile& tile, const Sizes& sizes) {
  std::vector<int64_t> out = {0};
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t prefix : out) {
      for (const Interval& i : tile[d]) {
        for (int64_t e = i.begin; e < i.end; ++e) next.push_back(prefix * sizes[d] + e);
      }
    }
    out = next;
  }
  return out;
}

}  // namespace

TEST_CASE("slices of pieces") {
  CHECK(text(slice_tiles(0, 2, 1, 5)({{{0, 4}}, {{0, 3}}})) == "0-2 0-3 ");
  CHECK(text(slice_tiles(0, 2, 1, 5)({{{4, 8}}, {{0, 3}}})) == "2-5 0-3 ");
  CHECK(text(slice_tiles(0, 2, 1, 5)({{{7, 8}}, {{0, 3}}})) == "- 0-3 ");
  CHECK(text(slice_tiles(1, 1, 3, 3)({{{0, 2}}, {{2, 8}}})) == "0-2 1-3 ");
  CHECK(text(slice_tiles(1, 1, 3, 3)({{{0, 2}}, {{2, 4}}})) == "0-2 - ");
  CHECK(text(slice_tiles(0, 1, 1, 6)({{{0, 2}, {4, 6}}})) == "0-1+3-5 ");
  CHECK(text(slice_tiles(0, 1, 2, 3)({{{0, 2}, {4, 6}}})) == "none");
  CHECK(text(slice_tiles(0, 3, 1, 0)({{{0, 4}}})) == "- ");
  CHECK(slice_start(std::nullopt, 8) == 0);
  CHECK(slice_start(-3, 8) == 5);
  CHECK(slice_start(-30, 8) == 0);
  CHECK(slice_start(30, 8) == 8);
}

TEST_CASE("elements of pieces") {
  CHECK(text(select_tiles(0, 2)({{{0, 4}}, {{0, 3}}})) == "0-3 ");
  CHECK(text(select_tiles(0, 2)({{{0, 2}, {3, 4}}, {{0, 3}}})) == "- ");
  CHECK(text(select_tiles(1, 0)({{{1, 2}}, {{0, 1}}})) == "1-2 ");
}

TEST_CASE("diagonals of pieces") {
  CHECK(text(diagonal_tiles(0, 1, 0, 4)({{{0, 2}}, {{0, 6}}})) == "0-2 ");
  CHECK(text(diagonal_tiles(0, 1, 0, 4)({{{2, 4}}, {{0, 3}}})) == "2-3 ");
  CHECK(text(diagonal_tiles(0, 1, 2, 4)({{{1, 4}}, {{0, 4}}})) == "1-2 ");
  CHECK(text(diagonal_tiles(0, 1, -1, 3)({{{2, 4}}, {{0, 6}}})) == "1-3 ");
  CHECK(text(diagonal_tiles(1, 0, -1, 3)({{{0, 6}}, {{2, 4}}})) == "1-3 ");
  CHECK(text(diagonal_tiles(2, 0, 0, 4)({{{0, 4}}, {{3, 5}}, {{0, 2}}})) == "3-5 0-2 ");
  CHECK(text(diagonal_tiles(0, 1, 0, 4)({{{0, 2}}, {{2, 4}}})) == "- ");
  CHECK(text(diagonal_tiles(0, 1, 0, 6)({{{0, 2}, {4, 6}}, {{0, 5}}})) == "none");
  CHECK(text(diagonal_tiles(0, 1, 0, 6)({{{0, 2}, {4, 6}}, {{4, 5}}})) == "4-5 ");
}

TEST_CASE("pieces in other dimensions") {
  CHECK(text(regroup_tiles({4, 6}, {24})({{{1, 3}}, {{0, 6}}})) == "6-18 ");
  CHECK(text(regroup_tiles({4, 6}, {24})({{{1, 3}}, {{2, 4}}})) == "8-10+14-16 ");
  CHECK(text(regroup_tiles({24}, {4, 6})({{{6, 18}}})) == "1-3 0-6 ");
  CHECK(text(regroup_tiles({24}, {4, 6})({{{8, 10}, {14, 16}}})) == "1-3 2-4 ");
  CHECK(text(regroup_tiles({24}, {4, 6})({{{8, 14}}})) == "none");
  CHECK(text(regroup_tiles({24}, {2, 3, 4})({{{4, 8}, {16, 20}}})) == "0-2 1-2 0-4 ");
  CHECK(text(regroup_tiles({2, 1, 6}, {2, 6})({{{0, 2}}, {{0, 1}}, {{1, 4}}})) == "0-2 1-4 ");
  CHECK(text(regroup_tiles({2, 6}, {1, 2, 1, 6, 1})({{{1, 2}}, {{1, 4}}})) == "0-1 1-2 0-1 1-4 0-1 ");
  CHECK(text(regroup_tiles({1, 6}, {6})({{}, {{0, 6}}})) == "- ");
  CHECK(text(regroup_tiles({0, 6}, {6, 0})({{}, {{0, 6}}})) == "none");
  // Every second element is held, which makes more intervals than are allowed.
  const Tile fine = {{{0, 5000}}, {{0, 1}}};
  CHECK(text(regroup_tiles({5000, 2}, {10000})(fine)) == "none");
}

TEST_CASE("a view of a piece has the piece's elements") {
  std::mt19937 random(11);
  const std::vector<Sizes> shapes = {{24}, {4, 6}, {2, 3, 4}, {6, 4}, {2, 12}, {1, 24, 1}, {3, 1, 8}, {2, 2, 2, 3}};
  int kept = 0;
  for (int trial = 0; trial < 5000; ++trial) {
    const Sizes& from = shapes[random() % shapes.size()];
    const Sizes& to = shapes[random() % shapes.size()];
    Tile tile;
    for (const int64_t size : from) {
      Intervals part;
      for (int64_t e = 0; e < size; ++e) {
        if (random() % 3 != 0) append(part, {.begin = e, .end = e + 1});
      }
      if (random() % 2 == 0) part = one_interval(0, size);
      tile.push_back(part);
    }
    const std::optional<Tile> viewed = regroup_tiles(from, to)(tile);
    if (!viewed) continue;
    ++kept;
    CHECK(elements(*viewed, to) == elements(tile, from));
  }
  CHECK(kept > 1000);
}

#include "tessera/ops/rules/view_groups.h"

#include <string>

#include <doctest/doctest.h>

namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

struct Pair {
  std::size_t input_dim;
  std::size_t output_dim;
  friend bool operator==(const Pair&, const Pair&) = default;
};

std::vector<Pair> pairs(const Sizes& from, const Sizes& to) {
  std::vector<Pair> out;
  for (const ViewGroup& group : view_groups(from, to)) out.push_back({group.input_dim, group.output_dim});
  return out;
}

TEST_CASE("a view's dimensions pair off by the leftmost of each group that holds the same elements") {
  struct Row {
    std::string why;
    Sizes from;
    Sizes to;
    std::vector<Pair> want;
  };
  const std::vector<Row> rows = {
      {"nothing changes", {5, 3}, {5, 3}, {{0, 0}, {1, 1}}},
      {"heads split off", {2, 7, 12}, {2, 7, 3, 4}, {{0, 0}, {1, 1}, {2, 2}}},
      {"heads joined", {2, 7, 3, 4}, {2, 7, 12}, {{0, 0}, {1, 1}, {2, 2}}},
      {"the front flattened", {2, 3, 4}, {6, 4}, {{0, 0}, {2, 1}}},
      {"all mixed", {4, 6}, {6, 4}, {{0, 0}}},
      {"a 1 dropped", {5, 1, 3}, {5, 3}, {{0, 0}, {2, 1}}},
      {"a 1 added in front", {5, 3}, {1, 5, 3}, {{0, 1}, {1, 2}}},
      {"a 1 kept", {1, 6}, {1, 2, 3}, {{0, 0}, {1, 1}}},
      {"no elements", {3, 0, 4}, {3, 0, 2, 2}, {{0, 0}, {1, 1}}},
      {"one element", {1, 1}, {}, {}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK((pairs(row.from, row.to) == row.want));
  }
}

TEST_CASE("a split goes through a view where its chunks hold the same elements, uneven and nested") {
  struct Row {
    std::string why;
    Sizes from;
    Sizes to;
    Sizes mesh;
    bool want;
  };
  const std::vector<Row> rows = {
      {"12 as (3, 4) over 3", {12}, {3, 4}, {3}, true},
      {"12 as (3, 4) over 2: 6, 6 against 8, 4", {12}, {3, 4}, {2}, false},
      {"12 as (3, 4) over 4: 3 each against 4, 4, 4, 0", {12}, {3, 4}, {4}, false},
      {"(3, 4) as 12 over 3", {3, 4}, {12}, {3}, true},
      {"(3, 4) as 12 over 2", {3, 4}, {12}, {2}, false},
      {"20 as (5, 4) over 5, more heads than 4", {20}, {5, 4}, {5}, true},
      {"one head over 2: 2, 2 against 4, 0", {4}, {1, 4}, {2}, true},
      {"24 as (6, 4) over 2 x 3", {24}, {6, 4}, {2, 3}, true},
      {"24 as (6, 4) over 2 x 2: 12 as 6, 6 against 3 as 2, 1", {24}, {6, 4}, {2, 2}, false},
      {"20 as (5, 4) over 2 x 2 is uneven at once", {20}, {5, 4}, {2, 2}, false},
      {"the same dimension, uneven", {5, 4}, {5, 2, 2}, {2, 2}, true},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const ViewGroup group = view_groups(row.from, row.to).at(0);
    CHECK(same_elements(group, Placements(row.mesh.size(), Shard(static_cast<int64_t>(group.input_dim))), row.mesh) ==
          row.want);
  }
}

TEST_CASE("mesh dimensions that split something else do not matter to a group") {
  const ViewGroup group = view_groups({12, 5}, {3, 4, 5}).at(0);
  const Sizes mesh = {4, 3};
  CHECK(same_elements(group, {Shard(1), Shard(0)}, mesh));
  CHECK(same_elements(group, {Partial(), Shard(0)}, mesh));
  CHECK_FALSE(same_elements(group, {Shard(0), Shard(1)}, mesh));
  CHECK_FALSE(same_elements(group, {Shard(0)}, mesh));
}

}  // namespace
}  // namespace tessera::rules

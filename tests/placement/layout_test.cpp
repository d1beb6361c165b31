#include "tessera/placement/layout.h"

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using tessera::testing::R;

namespace {

using Sizes = std::vector<int64_t>;

Sizes chunk_sizes(int64_t dim_size, int64_t num_parts) {
  Sizes out;
  for (int64_t i = 0; i < num_parts; ++i) out.push_back(chunk_range(dim_size, num_parts, i).size());
  return out;
}

// Returns what coordinates 0 .. product-1 of the mesh hold of dimension 0.
std::vector<Intervals> held(int64_t dim_size, const Placements& placements, const Sizes& mesh_shape) {
  std::vector<Intervals> out;
  const Mesh mesh(mesh_shape);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    out.push_back(local_tile(Sizes{dim_size, 2}, placements, mesh_shape, *mesh.coordinate_of(rank))[0]);
  }
  return out;
}

// Returns the elements one by one.
Sizes indices(const Intervals& intervals) {
  Sizes out;
  for (const Interval& interval : intervals) {
    for (int64_t i = interval.begin; i < interval.end; ++i) out.push_back(i);
  }
  return out;
}

// Stands for a user's partition: part 0 has the even elements, part 1 the odd ones.
class EvenOdd final : public Partition {
 public:
  explicit EvenOdd(bool whole = true) : Partition("EvenOdd", ""), whole_(whole) {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    Intervals out;
    for (int64_t i = index; i < size - (whole_ ? 0 : 1); i += parts) append(out, {.begin = i, .end = i + 1});
    return out;
  }

 private:
  const bool whole_;
};

// Stands for a user's partition that says it need not be checked, and cannot cut every size.
class Pairs final : public Partition {
 public:
  Pairs() : Partition("Pairs", "") {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    if (size % 2 != 0) throw std::invalid_argument("Pairs cannot cut " + std::to_string(size) + " elements");
    const int64_t pairs = size / 2, begin = pairs * index / parts * 2, end = pairs * (index + 1) / parts * 2;
    return begin == end ? Intervals{} : Intervals{{begin, end}};
  }
  bool exact() const override { return true; }
};

// Stands for a user's partition whose parts are no ascending lists of intervals.
class Backwards final : public Partition {
 public:
  Backwards() : Partition("Backwards", "") {}
  Intervals part(int64_t size, int64_t, int64_t index) const override {
    return index == 0 ? Intervals{{1, size}, {0, 1}} : Intervals{};
  }
};

// Stands for a user's partition whose intervals touch: part 0 has the first two elements one by one.
class Touching final : public Partition {
 public:
  Touching() : Partition("Touching", "") {}
  Intervals part(int64_t size, int64_t, int64_t index) const override {
    return index == 0 ? Intervals{{0, 1}, {1, 2}} : Intervals{{2, size}};
  }
};

}  // namespace

TEST_CASE("chunk_range: full parts, then one short part, then empty parts") {
  struct Row {
    const char* why;
    int64_t dim_size;
    int64_t num_parts;
    Sizes want;
  };
  const std::vector<Row> rows = {
      {"divides evenly", 8, 4, {2, 2, 2, 2}},
      {"a short one", 10, 4, {3, 3, 3, 1}},
      {"short, then empty", 5, 4, {2, 2, 1, 0}},
      {"more parts than elements", 3, 4, {1, 1, 1, 0}},
      {"empty before the end", 6, 4, {2, 2, 2, 0}},
      {"two empty ones", 9, 8, {2, 2, 2, 2, 1, 0, 0, 0}},
      {"empty dimension", 0, 2, {0, 0}},
      {"one part", 7, 1, {7}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(chunk_sizes(row.dim_size, row.num_parts) == row.want);
  }
  CHECK(chunk_range(5, 4, 3) == Interval{.begin = 5, .end = 5});
}

TEST_CASE("chunks tile the dimension in order") {
  for (int64_t size = 0; size <= 20; ++size) {
    for (int64_t parts = 1; parts <= 9; ++parts) {
      CAPTURE(size);
      CAPTURE(parts);
      int64_t next = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Interval range = chunk_range(size, parts, i);
        CHECK(range.begin == next);
        CHECK(range.size() >= 0);
        next += range.size();
      }
      CHECK(next == size);
    }
  }
}

TEST_CASE("chunk_range refuses what is no part") {
  const auto refused = [](int64_t size, int64_t parts, int64_t index, const char* part) {
    CHECK_THROWS_WITH_AS(chunk_range(size, parts, index), doctest::Contains(part), std::invalid_argument);
  };
  refused(8, 2, 2, "part 2 of 2 parts of 8 elements does not exist");
  refused(8, 2, -1, "part -1 of 2 parts");
  refused(-1, 2, 0, "part 0 of 2 parts of -1 elements");
  refused(8, 0, 0, "part 0 of 0 parts");
}

TEST_CASE("mesh dimensions that shard one tensor dimension nest, the first outermost") {
  // 5 elements are cut over 2 ranks, then over 2: this does not give the flat chunks 2, 2, 1, 0.
  CHECK(held(5, {Shard(0), Shard(0)}, {2, 2}) == std::vector<Intervals>{{{0, 2}}, {{2, 3}}, {{3, 4}}, {{4, 5}}});
  CHECK(
      held(18, {Shard(0), Shard(0)}, {4, 2}) ==
      std::vector<Intervals>{{{0, 3}}, {{3, 5}}, {{5, 8}}, {{8, 10}}, {{10, 13}}, {{13, 15}}, {{15, 17}}, {{17, 18}}});
  // 13 over 4 gives 4, 4, 4, 1; the last piece, of one element, is cut into 1 and 0.
  CHECK(held(13, {Shard(0), Shard(0)}, {4, 2}).back() == Intervals{});
  CHECK(held(3, {Replicate(), Shard(0)}, {2, 2}) == std::vector<Intervals>{{{0, 2}}, {{2, 3}}, {{0, 2}}, {{2, 3}}});
  CHECK(held(3, {Shard(0), Partial()}, {2, 2}) == std::vector<Intervals>{{{0, 2}}, {{0, 2}}, {{2, 3}}, {{2, 3}}});
}

TEST_CASE("local_shape has the sizes of the box") {
  CHECK(local_shape(Sizes{5, 3}, {Shard(1), Shard(0)}, Sizes{2, 2}, Sizes{1, 1}) == Sizes{2, 1});
  CHECK(local_shape(Sizes{5, 3}, {Replicate(), Partial()}, Sizes{2, 2}, Sizes{1, 1}) == Sizes{5, 3});
  CHECK(local_shape(Sizes{}, {Replicate()}, Sizes{4}, Sizes{3}).empty());
}

TEST_CASE("pieces of sharded dimensions tile the tensor") {
  const Sizes mesh_shape = {2, 3};
  const Mesh mesh(mesh_shape);
  const std::vector<Placements> layouts = {{Shard(0), Shard(0)},
                                           {Shard(0), Shard(1)},
                                           {Shard(1), Shard(0)},
                                           {Shard(1), Shard(1)},
                                           {Shard(0).ordered(1), Shard(0)},
                                           {BlockCyclic(0, 2), Shard(0)},
                                           {Shard(0), BlockCyclic(0, 1)},
                                           {BlockCyclic(1, 2), BlockCyclic(1, 1).ordered(0)}};
  for (int64_t rows = 0; rows <= 7; ++rows) {
    for (const Placements& placements : layouts) {
      CAPTURE(rows);
      CAPTURE(to_string(placements));
      std::vector<int> times(static_cast<std::size_t>(rows * 5), 0);
      for (int64_t rank = 0; rank < mesh.size(); ++rank) {
        const Tile tile = local_tile(Sizes{rows, 5}, placements, mesh_shape, *mesh.coordinate_of(rank));
        for (const int64_t i : indices(tile[0])) {
          for (const int64_t j : indices(tile[1])) ++times[static_cast<std::size_t>(i * 5 + j)];
        }
      }
      CHECK(times == std::vector<int>(times.size(), 1));
    }
  }
}

TEST_CASE("normalize counts negative dimensions from the end and refuses what does not fit") {
  const Mesh mesh({2, 2}, {"dp", "tp"});
  CHECK(normalize({Shard(-1), Shard(-3)}, mesh, 3, "test") == Placements{Shard(2), Shard(0)});
  CHECK(normalize({Replicate(), Partial()}, mesh, 0, "test") == Placements{Replicate(), Partial()});
  const auto refused = [&](const Placements& placements, int64_t ndim, const std::string& part) {
    CAPTURE(part);
    CHECK_THROWS_WITH_AS(normalize(placements, mesh, ndim, "test"), doctest::Contains(part.c_str()),
                         std::invalid_argument);
  };
  refused({Shard(0)}, 2, "test: 1 placements [S(0)] for the mesh {dp: 2, tp: 2}, which has 2 dimensions");
  refused({}, 2, "0 placements []");
  refused({Replicate(), Replicate(), Replicate()}, 2, "give one placement per mesh dimension");
  refused({Shard(2), Replicate()}, 2, "S(2) is outside a tensor of 2 dimensions; its dimensions are [-2, 2)");
  refused({Replicate(), Shard(-3)}, 2, "S(-3) is outside a tensor of 2 dimensions");
  refused({Replicate(), Shard(0)}, 0, "S(0) is outside a tensor of 0 dimensions");
}

TEST_CASE("of equal layouts one is normal") {
  const Mesh mesh({2, 1, 2}, {"a", "b", "c"});
  const auto normal = [&](const Placements& placements) { return normalize(placements, mesh, 2, "test"); };
  CHECK(normal({Shard(0).ordered(3), Shard(0).ordered(1), Shard(0).ordered(7)}) ==
        Placements{Shard(0), Shard(0), Shard(0)});
  CHECK(normal({Shard(0).ordered(5), Replicate(), Shard(0).ordered(2)}) ==
        Placements{Shard(0).ordered(1), Replicate(), Shard(0)});
  CHECK(normal({Shard(0).ordered(5), Shard(1).ordered(9), Shard(1).ordered(2)}) ==
        Placements{Shard(0), Shard(1), Shard(1)});
}

TEST_CASE("an order is PyTorch's _StridedShard") {
  // This is _StridedShard(0, split_factor 2) over the first mesh dimension of (4, 2), for 8 rows: the second mesh
  // dimension cuts first.
  CHECK(held(8, {Shard(0).ordered(1), Shard(0)}, {4, 2}) ==
        std::vector<Intervals>{{{0, 1}}, {{4, 5}}, {{1, 2}}, {{5, 6}}, {{2, 3}}, {{6, 7}}, {{3, 4}}, {{7, 8}}});
  // PyTorch asserts on 9 elements over 4 in 2 chunks. Here these are 5 and 4 elements, and then 3, 2 and 2, 2.
  CHECK(held(9, {Shard(0).ordered(1), Shard(0)}, {2, 2}) ==
        std::vector<Intervals>{{{0, 3}}, {{5, 7}}, {{3, 5}}, {{7, 9}}});
}

TEST_CASE("partitions other than chunks") {
  CHECK(held(10, {BlockCyclic(0, 2)}, {2}) == std::vector<Intervals>{{{0, 2}, {4, 6}, {8, 10}}, {{2, 4}, {6, 8}}});
  CHECK(held(5, {BlockCyclic(0, 3)}, {3}) == std::vector<Intervals>{{{0, 3}}, {{3, 5}}, {}});
  CHECK(held(4, {BlockCyclic(0, int64_t{1} << 62)}, {2}) == std::vector<Intervals>{{{0, 4}}, {}});
  CHECK(held(8, {RaggedShard(0, {5, 0, 3})}, {3}) == std::vector<Intervals>{{{0, 5}}, {}, {{5, 8}}});
  const Placement both = RaggedShard(0, {1, 2, 3, 4});
  CHECK(held(10, {both, both}, {2, 2}) == std::vector<Intervals>{{{0, 1}}, {{1, 3}}, {{3, 6}}, {{6, 10}}});
  CHECK(held(10, {both.ordered(1), both}, {2, 2}) == std::vector<Intervals>{{{0, 1}}, {{3, 6}}, {{1, 3}}, {{6, 10}}});
  const Placement lists = IntervalShard(0, {{{0, 1}, {4, 6}}, {{1, 4}}});
  CHECK(held(6, {lists}, {2}) == std::vector<Intervals>{{{0, 1}, {4, 6}}, {{1, 4}}});
  // A user's partition of a chunk sees only the chunk's size.
  CHECK(held(6, {Shard(0), Shard(0, std::make_shared<const EvenOdd>())}, {2, 2}) ==
        std::vector<Intervals>{{{0, 1}, {2, 3}}, {{1, 2}}, {{3, 4}, {5, 6}}, {{4, 5}}});
}

TEST_CASE("cuts that cannot be beside the placement of one mesh dimension are replaced") {
  const Mesh mesh({2, 2}, {"dp", "tp"});
  const Placement together = RaggedShard(0, {2, 0, 1, 0});
  CHECK(fitted_around(1, {together, together}, mesh, Sizes{3, 10}) == Placements{together, together});
  CHECK(fitted_around(1, {together, R}, mesh, Sizes{3, 10}) == Placements{Shard(0), R});
  CHECK(fitted_around(1, {together, Shard(1)}, mesh, Sizes{3, 10}) == Placements{Shard(0), Shard(1)});
  CHECK(fitted_around(0, {Shard(0), RaggedShard(0, {1, 2})}, mesh, Sizes{4}) == Placements{Shard(0), Shard(0)});
  CHECK(fitted_around(1, {Shard(0), RaggedShard(0, {0, 5})}, mesh, Sizes{5}) == Placements{R, RaggedShard(0, {0, 5})});
  CHECK(fitted_around(1, {Shard(1), RaggedShard(0, {0, 5})}, mesh, Sizes{5, 2}) ==
        Placements{Shard(1), RaggedShard(0, {0, 5})});
}

TEST_CASE("a partition that does not fit is refused, whoever wrote it") {
  const Mesh mesh({2, 2}, {"dp", "tp"});
  const auto refused = [&](const Placements& placements, int64_t size, const std::string& part) {
    CAPTURE(part);
    CHECK_THROWS_WITH_AS(check_layout(placements, mesh, Sizes{size}, "test"), doctest::Contains(part.c_str()),
                         std::invalid_argument);
  };
  check_layout({RaggedShard(0, {3, 1}), R}, mesh, Sizes{4}, "test");
  refused({RaggedShard(0, {3, 1, 0}), R}, 4, "RS,3,1,0 has 3 parts, but its mesh dimensions have 2 coordinates");
  refused({RaggedShard(0, {1, 1, 1, 1}), R}, 4, "has 4 parts, but its mesh dimensions have 2 coordinates");
  refused({RaggedShard(0, {3, 1}), R}, 5, "RS,3,1 cuts 4 elements, but the earlier mesh dimensions leave 5");
  refused({Shard(0), RaggedShard(0, {3, 1})}, 4, "leave 2; the sizes of its parts must add up to that");
  refused({IntervalShard(0, {{{0, 2}}, {{1, 3}}}), R}, 4, "element 1 is missing, held twice or outside");
  refused({IntervalShard(0, {{{0, 2}}, {{3, 5}}}), R}, 4, "element 2 is missing, held twice or outside");
  refused({Shard(0, std::make_shared<const EvenOdd>(false)), R}, 4,
          "the 2 parts of EvenOdd do not hold each of 4 elements once");
  refused({Shard(0, std::make_shared<const Backwards>()), R}, 4,
          "Backwards gives part 0 of 2 as 1-4+0-1; part() must return ascending intervals of at least one element");
  refused({Shard(0, std::make_shared<const Touching>()), R}, 4,
          "Touching gives part 0 of 2 as 0-1+1-2; part() must return ascending intervals of at least one element, and "
          "one interval where two touch");
  CHECK_FALSE(is_layout({Shard(0, std::make_shared<const Backwards>()), R}, mesh, Sizes{4}));
  const auto promises = std::make_shared<const Pairs>();
  check_layout({Shard(0, promises), R}, mesh, Sizes{4}, "test");
  refused({Shard(0, promises), R}, 5, "Pairs cannot cut 5 elements");
  CHECK_FALSE(is_layout({Shard(0, promises), R}, mesh, Sizes{5}));
  // The other cut leaves 4 of the 8 elements.
  check_layout({Shard(0), RaggedShard(0, {4})}, Mesh({2, 1}), Sizes{8}, "test");
  const Mesh lone({1}, {"tp"});
  CHECK_THROWS_WITH_AS(check_layout({RaggedShard(0, {2, 2})}, lone, Sizes{4}, "test"), doctest::Contains("has 2 parts"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(check_layout({RaggedShard(0, {2})}, lone, Sizes{4}, "test"),
                       doctest::Contains("cuts 2 elements"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(RaggedShard(0, {2, -1}), doctest::Contains("sizes [2, -1] are no parts"), std::invalid_argument);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  CHECK_THROWS_WITH_AS(RaggedShard(0, {kMost, kMost, 10}), doctest::Contains("is too large"), std::invalid_argument);
  CHECK_NOTHROW(RaggedShard(0, {kMost - 10, 10}));
  CHECK_THROWS_WITH_AS(RaggedShard(0, {}), doctest::Contains("give one size of at least 0 per rank"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(BlockCyclic(0, 0), doctest::Contains("a block of 0 elements"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(IntervalShard(0, {}), doctest::Contains("no parts"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(IntervalShard(0, {{{2, 1}}}), doctest::Contains("part 2-1 is not a list"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(Shard(0, nullptr), doctest::Contains("the partition is null"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(Replicate().ordered(1), doctest::Contains("R cannot have order 1"), std::invalid_argument);
}

#include "tessera/placement/layout.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;

namespace {

using Sizes = std::vector<int64_t>;

Sizes chunk_sizes(int64_t dim_size, int64_t num_parts) {
  Sizes out;
  for (int64_t i = 0; i < num_parts; ++i) out.push_back(chunk_range(dim_size, num_parts, i).size);
  return out;
}

// What coordinates 0 .. product-1 of the mesh hold of dimension 0, as (offset, size).
std::vector<Range> held(int64_t dim_size, const Placements& placements, const Sizes& mesh_shape) {
  std::vector<Range> out;
  const Mesh mesh(mesh_shape);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    out.push_back(local_box(Sizes{dim_size, 2}, placements, mesh_shape, *mesh.coordinate_of(rank))[0]);
  }
  return out;
}

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
  CHECK(chunk_range(5, 4, 3) == Range{.offset = 5, .size = 0});
}

TEST_CASE("chunks tile the dimension in order") {
  for (int64_t size = 0; size <= 20; ++size) {
    for (int64_t parts = 1; parts <= 9; ++parts) {
      CAPTURE(size);
      CAPTURE(parts);
      int64_t next = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Range range = chunk_range(size, parts, i);
        CHECK(range.offset == next);
        CHECK(range.size >= 0);
        next += range.size;
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
  // 5 over 2, then over 2: not the flat chunks 2, 2, 1, 0.
  CHECK(held(5, {Shard(0), Shard(0)}, {2, 2}) == std::vector<Range>{{0, 2}, {2, 1}, {3, 1}, {4, 1}});
  CHECK(held(18, {Shard(0), Shard(0)}, {4, 2}) ==
        std::vector<Range>{{0, 3}, {3, 2}, {5, 3}, {8, 2}, {10, 3}, {13, 2}, {15, 2}, {17, 1}});
  // 13 over 4: 4, 4, 4, 1; the last piece of one element is 1 and 0.
  CHECK(held(13, {Shard(0), Shard(0)}, {4, 2}).back() == Range{.offset = 13, .size = 0});
  CHECK(held(3, {Replicate(), Shard(0)}, {2, 2}) == std::vector<Range>{{0, 2}, {2, 1}, {0, 2}, {2, 1}});
  CHECK(held(3, {Shard(0), Partial()}, {2, 2}) == std::vector<Range>{{0, 2}, {0, 2}, {2, 1}, {2, 1}});
}

TEST_CASE("local_shape has the sizes of the box") {
  CHECK(local_shape(Sizes{5, 3}, {Shard(1), Shard(0)}, Sizes{2, 2}, Sizes{1, 1}) == Sizes{2, 1});
  CHECK(local_shape(Sizes{5, 3}, {Replicate(), Partial()}, Sizes{2, 2}, Sizes{1, 1}) == Sizes{5, 3});
  CHECK(local_shape(Sizes{}, {Replicate()}, Sizes{4}, Sizes{3}).empty());
}

TEST_CASE("pieces of sharded dimensions tile the tensor") {
  const Sizes mesh_shape = {2, 3};
  const Mesh mesh(mesh_shape);
  const std::vector<Placements> layouts = {
      {Shard(0), Shard(0)}, {Shard(0), Shard(1)}, {Shard(1), Shard(0)}, {Shard(1), Shard(1)}};
  for (int64_t rows = 0; rows <= 7; ++rows) {
    for (const Placements& placements : layouts) {
      CAPTURE(rows);
      CAPTURE(to_string(placements));
      std::vector<int> times(static_cast<std::size_t>(rows * 5), 0);
      for (int64_t rank = 0; rank < mesh.size(); ++rank) {
        const auto box = local_box(Sizes{rows, 5}, placements, mesh_shape, *mesh.coordinate_of(rank));
        for (int64_t i = box[0].offset; i < box[0].offset + box[0].size; ++i) {
          for (int64_t j = box[1].offset; j < box[1].offset + box[1].size; ++j) ++times[static_cast<std::size_t>(i * 5 + j)];
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
    CHECK_THROWS_WITH_AS(normalize(placements, mesh, ndim, "test"), doctest::Contains(part.c_str()), std::invalid_argument);
  };
  refused({Shard(0)}, 2, "test: 1 placements [S(0)] for the mesh {dp: 2, tp: 2}, which has 2 dimensions");
  refused({}, 2, "0 placements []");
  refused({Replicate(), Replicate(), Replicate()}, 2, "give one placement a mesh dimension");
  refused({Shard(2), Replicate()}, 2, "S(2) is outside a tensor of 2 dimensions; its dimensions are [-2, 2)");
  refused({Replicate(), Shard(-3)}, 2, "S(-3) is outside a tensor of 2 dimensions");
  refused({Replicate(), Shard(0)}, 0, "S(0) is outside a tensor of 0 dimensions");
}

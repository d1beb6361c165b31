// Tests every pair of layouts on two mesh dimensions, and twenty thousand on three, on ranks that are threads.

#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/dtensor/redistribute/pairs.h"

using namespace tessera::testing;
using Sizes = std::vector<int64_t>;

namespace {

void check_every_pair(const Sizes& mesh_shape) {
  for (const Sizes& shape : kShapes) {
    check_in_process(all_pairs(built_in_layouts(shape, mesh_shape)), shape, mesh_shape);
  }
}

void check_every_integer_pair(const Sizes& mesh_shape) {
  for (const Sizes& shape : kShapes) {
    check_in_process(all_pairs(integer_layouts(shape, mesh_shape)), shape, mesh_shape, at::kLong);
  }
}

}  // namespace

TEST_CASE("2x2: every pair") { check_every_pair({2, 2}); }

TEST_CASE("2x3: every pair") { check_every_pair({2, 3}); }

TEST_CASE("2x2: every pair of integers") { check_every_integer_pair({2, 2}); }

TEST_CASE("2x3: every pair of integers") { check_every_integer_pair({2, 3}); }

TEST_CASE("2x2x2: twenty thousand pairs") {
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    const auto layouts = built_in_layouts(kShapes[i], {2, 2, 2});
    check_in_process(some_pairs(layouts, 4000, static_cast<uint32_t>(i)), kShapes[i], {2, 2, 2});
  }
}

// Every pair of layouts, on ranks that are threads.

#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/dtensor/pairs.h"

using namespace tessera::testing;
using Sizes = std::vector<int64_t>;

TEST_CASE("one mesh dimension: every pair, every shape, and gradients") {
  for (const Sizes& shape : kShapes) check_in_process(all_pairs(built_in_layouts(shape, {4})), shape, {4});
}

TEST_CASE("two and three mesh dimensions: pairs drawn by seed, and gradients") {
  for (const Sizes& mesh_shape : {Sizes{2, 2}, Sizes{2, 3}, Sizes{2, 2, 2}}) {
    for (const Sizes& shape : kShapes) {
      check_in_process(some_pairs(built_in_layouts(shape, mesh_shape), 60, 20260103), shape, mesh_shape);
    }
  }
}

TEST_CASE("integers and their bits: every pair on one mesh dimension, some on two") {
  for (const Sizes& shape : kShapes) {
    check_in_process(all_pairs(integer_layouts(shape, {4})), shape, {4}, at::kLong);
    for (const Sizes& mesh_shape : {Sizes{2, 2}, Sizes{2, 3}}) {
      check_in_process(some_pairs(integer_layouts(shape, mesh_shape), 200, 20260107), shape, mesh_shape, at::kLong);
    }
  }
}

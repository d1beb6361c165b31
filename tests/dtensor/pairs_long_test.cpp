// Every pair of layouts on two mesh dimensions, and twenty thousand on three, on ranks that are threads.

#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/dtensor/pairs.h"

using namespace tessera::testing;
using Sizes = std::vector<int64_t>;

TEST_CASE("two mesh dimensions: every pair") {
  for (const Sizes& mesh_shape : {Sizes{2, 2}, Sizes{2, 3}}) {
    for (const Sizes& shape : kShapes) {
      check_in_process(all_pairs(built_in_layouts(shape, mesh_shape)), shape, mesh_shape);
    }
  }
}

TEST_CASE("three mesh dimensions: twenty thousand pairs") {
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    const auto layouts = built_in_layouts(kShapes[i], {2, 2, 2});
    check_in_process(some_pairs(layouts, 4000, static_cast<uint32_t>(i)), kShapes[i], {2, 2, 2});
  }
}

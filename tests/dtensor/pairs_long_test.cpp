// Every pair of layouts on two mesh dimensions, and twenty thousand on three, on ranks that are threads.

#include <vector>

#include <doctest/doctest.h>

#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/pairs.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Sizes = std::vector<int64_t>;

const std::vector<Sizes> kShapes = {{8, 4}, {7, 5}, {3, 2}, {1, 1}, {0, 3}};

void check(const std::vector<Pair>& pairs, const Sizes& shape, const Sizes& mesh_shape) {
  int64_t ranks = 1;
  for (const int64_t n : mesh_shape) ranks *= n;
  run_in_process(ranks, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", mesh_shape, {}, world);
    check_pairs(pairs, shape, mesh);
    check_gradients(pairs, shape, mesh);
  });
}

}  // namespace

TEST_CASE("two mesh dimensions: every pair") {
  for (const Sizes& mesh_shape : {Sizes{2, 2}, Sizes{2, 3}}) {
    for (const Sizes& shape : kShapes) check(all_pairs(built_in_layouts(shape, mesh_shape)), shape, mesh_shape);
  }
}

TEST_CASE("three mesh dimensions: twenty thousand pairs") {
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    const auto layouts = built_in_layouts(kShapes[i], {2, 2, 2});
    check(some_pairs(layouts, 4000, static_cast<uint32_t>(i)), kShapes[i], {2, 2, 2});
  }
}

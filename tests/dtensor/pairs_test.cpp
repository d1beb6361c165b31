// Every pair of layouts, on ranks that are threads.

#include <vector>

#include <doctest/doctest.h>

#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/pairs.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Sizes = std::vector<int64_t>;

template <typename Body>
void on_mesh(const Sizes& mesh_shape, const Body& body) {
  int64_t ranks = 1;
  for (const int64_t n : mesh_shape) ranks *= n;
  run_in_process(ranks, [&](const std::shared_ptr<World>& world) { body(init_device_mesh("cpu", mesh_shape, {}, world)); });
}

// Even, uneven, smaller than the mesh, one, none.
const std::vector<Sizes> kShapes = {{8, 4}, {7, 5}, {3, 2}, {1, 1}, {0, 3}};

}  // namespace

TEST_CASE("one mesh dimension: every pair, every shape, and gradients") {
  for (const Sizes& shape : kShapes) {
    const auto pairs = all_pairs(built_in_layouts(shape, {4}));
    on_mesh({4}, [&](const DeviceMesh& mesh) {
      check_pairs(pairs, shape, mesh);
      check_gradients(pairs, shape, mesh);
    });
  }
}

TEST_CASE("two and three mesh dimensions: pairs drawn by seed, and gradients") {
  for (const Sizes& mesh_shape : {Sizes{2, 2}, Sizes{2, 3}, Sizes{2, 2, 2}}) {
    for (const Sizes& shape : kShapes) {
      const auto pairs = some_pairs(built_in_layouts(shape, mesh_shape), 60, 20260103);
      on_mesh(mesh_shape, [&](const DeviceMesh& mesh) {
        check_pairs(pairs, shape, mesh);
        check_gradients(pairs, shape, mesh);
      });
    }
  }
}

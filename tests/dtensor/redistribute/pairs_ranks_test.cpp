// Tests a thousand pairs of layouts on ranks that are processes: over Gloo, and in another test over MPI.

#include <chrono>
#include <cstdint>
#include <vector>

#include "tessera/tests/dtensor/redistribute/pairs.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera::testing;
using Sizes = std::vector<int64_t>;

TESSERA_RANKS_TEST_CASE("a thousand pairs of layouts: value and gradients",
                        Ranks({4}).time_limit(std::chrono::seconds(200))) {
  for (const Sizes& mesh_shape : {Sizes{4}, Sizes{2, 2}}) {
    const tessera::DeviceMesh mesh = mesh_over(mesh_shape);
    for (std::size_t i = 0; i < kShapes.size(); ++i) {
      const uint32_t seed = 20260105 + static_cast<uint32_t>(i);  // other pairs for each shape
      check_pairs(some_pairs(built_in_layouts(kShapes[i], mesh_shape), 100, seed), kShapes[i], mesh);
    }
  }
}

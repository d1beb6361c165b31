// A user's test of a user's function.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/ranks.h"

namespace {

double sum_of_ranks(const tessera::DeviceMesh& mesh) {
  const at::Tensor mine = at::full({3}, static_cast<double>(mesh.local_rank(0)));
  return tessera::all_reduce(mine, mesh, 0, tessera::ReduceOp::kSum).sum().item<double>();
}

}  // namespace

TESSERA_RANKS_TEST_CASE("every rank gets the sum of all ranks", {1, 2, 4}) {
  const int64_t size = tessera::testing::world_size();
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {size}, {"dp"}, tessera::testing::world());
  CHECK(sum_of_ranks(mesh) == doctest::Approx(3.0 * static_cast<double>(size * (size - 1)) / 2));
}

#include "tessera/tests/coming_from/one_process.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/tests/dtensor/values.h"

namespace tessera::testing {

DeviceMesh alone() { return {World::fake(0, 1), c10::kCPU, Mesh({1})}; }

void begin_draws(const DeviceMesh& mesh) { manual_seed(6, mesh.world()); }

at::Tensor first_values(const InitMethod& method, at::IntArrayRef sizes, const DeviceMesh& mesh,
                        const Placement& placement) {
  begin_draws(mesh);
  const at::Tensor weight = tessera::empty(sizes, mesh, {placement}, at::kDouble);
  const c10::AutoGradMode none(false);
  method(weight);
  return full_tensor(weight);
}

InitMethod quarters() {
  return [](at::Tensor weight) { weight.fill_(0.25); };
}

ModelParallelConfig in_double() { return {.params_dtype = at::kDouble}; }

void check_region(const std::function<at::Tensor(const at::Tensor&)>& region, const at::Tensor& mine,
                  const at::Tensor& want, const at::Tensor& g, const at::Tensor& gradient) {
  const at::Tensor x = leaf(mine);
  const at::Tensor y = region(x);
  CHECK(close(y.detach(), want));
  y.backward(g);
  CHECK(close(x.grad(), gradient));
}

}  // namespace tessera::testing

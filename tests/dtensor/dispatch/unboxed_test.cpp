// Tests the unboxed kernels, which run calls with a cached decision: they give the same results as the boxed path, and
// wait for pending pieces in the same order.

#include <memory>
#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

DeviceMesh line(const std::shared_ptr<World>& world) { return init_device_mesh("cpu", {world->size()}, {"tp"}, world); }

}  // namespace

TEST_CASE(
    "pending pieces are waited for in the arguments' order, also where one rank has nothing and takes the boxed path") {
  run_in_process(4, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
    const at::Tensor whole_a = whole_numbers({1, 8}, at::kDouble, 3), whole_b = whole_numbers({1, 8}, at::kDouble, 5);
    const at::Tensor a = spread(whole_a, mesh, {S1, P}), b = spread(whole_b, mesh, {S1, P});
    for (int call = 0; call < 3; ++call) {
      const at::Tensor x = redistribute(a, {S0, R}, {.async = true}), y = redistribute(b, {S0, R}, {.async = true});
      const at::Tensor difference = full_tensor(x - y);
      CHECK(at::equal(difference, whole_a - whole_b));
    }
  });
}

TEST_CASE("the contents of a tensor that is still pending are not given to the next tensor") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor first = whole_numbers({4, 6}, at::kDouble, 1), second = whole_numbers({4, 6}, at::kDouble, 2);
    const at::Tensor d = spread(first, mesh, {S0}), e = spread(second, mesh, {S0});
    {
      const at::Tensor w = d.clone();
      w.set_data(redistribute(d, {S1}, {.async = true}));
    }
    const at::Tensor z = e.clone();
    CHECK(at::equal(full_tensor(z), second));
  });
}

TEST_CASE("a cached decision gives the same value, layout and version as the first call") {
  run_in_process(3, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor whole = whole_numbers({7, 4}, at::kDouble, 1);
    for (const Placement& p : {S0, S1, R, P}) {
      CAPTURE(to_string(p));
      for (int call = 0; call < 3; ++call) {
        CAPTURE(call);
        const at::Tensor d = spread(whole, mesh, {p});
        CHECK(at::equal(full_tensor(at::mul(d, 0.0)), whole * 0.0));
        CHECK(at::equal(full_tensor(at::mul(d, 3.0)), whole * 3.0));
        CHECK(at::equal(full_tensor(d.t()), whole.t()));
        CHECK(at::equal(full_tensor(at::cat({d, d}, 1)), at::cat({whole, whole}, 1)));
        const auto version = d._version();
        d.add_(d);
        CHECK(d._version() == version + 1);
        CHECK(at::equal(full_tensor(d), whole + whole));
        const std::vector<at::Tensor> list = {d, d.clone()};
        for (const at::Tensor& t : at::_foreach_mul(list, list))
          CHECK(at::allclose(full_tensor(t), (whole + whole).square()));
      }
    }
  });
}

TEST_CASE("from_local takes a tensor's tangent along") {
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, World::fake(0, 2));
  const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  const at::Tensor dual = at::_make_dual(at::ones({2, 2}), at::ones({2, 2}), static_cast<int64_t>(level));
  const at::Tensor dtensor = from_local(dual, mesh, {S0});
  CHECK(to_local(dtensor._fw_grad(level)).equal(at::ones({2, 2})));
  torch::autograd::ForwardADLevel::release_idx(level);
}

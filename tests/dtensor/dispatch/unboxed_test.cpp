// Tests the unboxed kernels, which run calls with a cached decision: they give the same results as the boxed path, and
// wait for pending pieces in the same order.

#include <memory>

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

// Runs body(mesh, placement) three times for each placement, on three ranks: the first call decides, the others find
// the decision.
template <class Body>
void on_each_layout(const Body& body) {
  run_in_process(3, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = line(world);
    for (const Placement& p : {S0, S1, R, P}) {
      CAPTURE(to_string(p));
      for (int call = 0; call < 3; ++call) {
        CAPTURE(call);
        body(mesh, p);
      }
    }
  });
}

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
  const at::Tensor whole = whole_numbers({7, 4}, at::kDouble, 1);
  on_each_layout([&](const DeviceMesh& mesh, const Placement& p) {
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
  });
}

TEST_CASE("a cached decision counts for the number that it was made for") {
  const at::Tensor whole = whole_numbers({7, 4}, at::kDouble, 1), integers = whole_numbers({7, 4}, at::kLong, 1);
  on_each_layout([&](const DeviceMesh& mesh, const Placement& p) {
    for (const at::Scalar& number : {at::Scalar(2), at::Scalar(0.0), at::Scalar(7.5), at::Scalar(1)}) {
      CHECK(at::allclose(full_tensor(spread(whole, mesh, {p}).abs().pow(number)), whole.abs().pow(number), 1e-14));
      CHECK(at::equal(full_tensor(spread(whole, mesh, {p}).fill_(number)), at::full_like(whole, number)));
    }
    CHECK(at::equal(full_tensor(spread(integers, mesh, {p}).pow(2)), integers.pow(2)));
    CHECK_THROWS_WITH(spread(integers, mesh, {p}).pow(-1), doctest::Contains("negative integer powers"));
  });
}

TEST_CASE("cached decisions of parts, and of tensors like another") {
  const at::Tensor whole = whole_numbers({7, 4}, at::kDouble, 1);
  on_each_layout([&](const DeviceMesh& mesh, const Placement& p) {
    const at::Tensor d = spread(whole, mesh, {p});
    for (const int64_t dim : {0, 1}) {
      const std::vector<at::Tensor> parts = d.split(3, dim), want = whole.split(3, dim);
      REQUIRE(parts.size() == want.size());
      for (std::size_t i = 0; i < want.size(); ++i) CHECK(at::equal(full_tensor(parts[i]), want[i]));
    }
    if (p == S0) {
      const at::Tensor written = whole.clone();
      written.split(3, 1)[1].mul_(5);
      d.split(3, 1)[1].mul_(5);
      CHECK(at::equal(full_tensor(d), written));
    }
    CHECK(at::equal(full_tensor(at::ones_like(d)), at::ones_like(whole)));
    const at::Tensor zeros = at::zeros_like(d, at::kFloat);
    CHECK((zeros.scalar_type() == at::kFloat));
    CHECK(at::equal(full_tensor(zeros), at::zeros_like(whole, at::kFloat)));
    CHECK(full_tensor(at::zeros_like(d.t(), at::MemoryFormat::Contiguous)).is_contiguous());
  });
}

TEST_CASE("a kernel that makes pieces contiguous is left out only where all of them are") {
  run_in_process(3, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor x = sample({5, 6, 4}), w = sample({4}, 1), g = sample({5, 6, 4}, 2);
    const auto [y, mean, rstd] = at::native_layer_norm(x, {4}, w, w, 1e-5);
    const auto want = at::native_layer_norm_backward(g, x, {4}, mean, rstd, w, w, {true, true, true});
    for (const Placement& p : {S0, S1, R}) {
      CAPTURE(to_string(p));
      const at::Tensor dx = spread(x, mesh, {p}), dw = spread(w, mesh, {R}), dg = spread(g, mesh, {p});
      for (int call = 0; call < 4; ++call) {
        CAPTURE(call);
        // The statistics lie in one piece of memory, or each other one of a larger tensor is theirs.
        const auto lay_out = [&](const at::Tensor& t) {
          const at::Tensor piece = to_local(spread(t, mesh, {p}));
          const at::Tensor laid =
              call % 2 == 0 ? piece : at::stack({piece, at::full_like(piece, 99)}, -1).select(-1, 0);
          const at::Tensor d = from_local(laid, mesh, {p}, {.shape = t.sizes().vec(), .stride = t.strides().vec()});
          CHECK(to_local(d).is_contiguous() == (call % 2 == 0));
          return d;
        };
        const auto got =
            at::native_layer_norm_backward(dg, dx, {4}, lay_out(mean), lay_out(rstd), dw, dw, {true, true, true});
        CHECK(close(full_tensor(std::get<0>(got)), std::get<0>(want)));
        CHECK(close(full_tensor(std::get<1>(got)), std::get<1>(want)));
        CHECK(close(full_tensor(std::get<2>(got)), std::get<2>(want)));
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

// Tests operators on the items of a batch, by indices, and on lists, that the other tests do not cover, on DTensors of
// many layouts against plain tensors.

#include <stdexcept>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("losses of items, distances, pooling, sums at indices", {1, 2, 3, 4}) {
  const at::Tensor classes = at::tensor({0, 2, 1, 2, 0}, on(at::kLong));
  check_ops({
      op_case("multi_margin_loss", {sample({5, 3}), classes},
              [](const Tensors& x) {
                return Tensors{at::multi_margin_loss(x[0], x[1]),
                               at::multi_margin_loss(x[0], x[1], 1, 1, {}, at::Reduction::Sum)};
              }),
      op_case("cdist, one batch for all", {sample({1, 3, 4}), sample({5, 6, 4}, 1)},
              [](const Tensors& x) { return at::cdist(x[0], x[1]); }),
      op_case("avg_pool2d with few channels", {sample({4, 2, 6, 6})},
              [](const Tensors& x) {
                return at::avg_pool2d(x[0], {2, 2});
              }),
      op_case("group_norm with few channels", {sample({3, 2, 4}), sample({2}, 1), sample({2}, 2)},
              [](const Tensors& x) { return at::group_norm(x[0], 2, x[1], x[2]); }),
      op_case("scatter_add of one dimension", {sample({5}), at::tensor({3, 1}, on(at::kLong)), sample({4}, 1)},
              [](const Tensors& x) { return at::scatter_add(x[0], 0, x[1], x[2].detach()); }),
      op_case("index_put of one element", {sample({5}), at::scalar_tensor(2, on(at::kLong)), sample({}, 1)},
              [](const Tensors& x) { return at::index_put(x[0], {x[1]}, x[2], true); }),
      op_case(
          "index_add of truth values",
          {at::arange(5, on(at::kLong)) > 2, at::tensor({0, 4, 1}, on(at::kLong)), at::arange(3, on(at::kLong)) > 0},
          [](const Tensors& x) { return at::index_add(x[0], 0, x[1], x[2]); }),
      op_case("trace of whole numbers", {at::arange(20, on(at::kInt)).view({5, 4})},
              [](const Tensors& x) { return at::trace(x[0]); }),
      op_case("fftn of no dimensions", {at::complex(sample({}), sample({}, 1))},
              [](const Tensors& x) { return at::fft_fftn(x[0]).abs(); }),
  });
}

TESSERA_RANKS_TEST_CASE("a number's value that a rule uses is part of a cached decision", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = at::arange(4, on(at::kDouble));
  const at::Tensor x = distribute_tensor(whole, mesh, {Shard(0)}, kNoSource);
  CHECK(at::equal(full_tensor(at::histc(x, 4, -2, 2)), at::histc(whole, 4, -2, 2)));
  CHECK(at::equal(full_tensor(at::histc(x, 4)), at::histc(whole, 4)));
}

TESSERA_RANKS_TEST_CASE("terms of whole numbers are reduced before a mean rounds them", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor term = at::tensor({1, 1, 0, 0}, on(at::kLong)).view({1, 1, 2, 2});
  const at::Tensor x = from_local(term, mesh, {Partial()});
  if (!device().is_cpu()) {
    CHECK(full_tensor(x).sum().item<int64_t>() == 4);  // LibTorch has no such pooling of whole numbers on a GPU
    return;
  }
  CHECK(full_tensor(at::avg_pool2d(x, {2, 2})).item<int64_t>() == 1);
}

TESSERA_RANKS_TEST_CASE(
    "a fused step on a parameter that is not row-major takes a redistributed gradient element by element", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor value = sample({4, 5});
  const at::Tensor grad = sample({4, 5}, 1);
  const auto step = [](const at::Tensor& p, const at::Tensor& g) {
    const std::vector<at::Tensor> first = {at::zeros_like(p)};
    const std::vector<at::Tensor> second = {at::zeros_like(p)};
    at::_fused_adam_(std::vector<at::Tensor>{p}, std::vector<at::Tensor>{g}, first, second, {},
                     std::vector<at::Tensor>{at::ones({}, on(at::kFloat))}, 0.1, 0.9, 0.99, 0.0, 1e-8, false, false);
  };
  const at::Tensor plain = value.t().contiguous().t();
  step(plain, grad.t().contiguous().t());
  const at::Tensor spread = distribute_tensor(value.t().contiguous(), mesh, {Shard(0)}, kNoSource).t();
  const at::Tensor terms =
      from_local((grad / static_cast<double>(mesh.size())).t().contiguous(), mesh, {Partial()}).t();
  step(spread, terms);
  CHECK(at::allclose(full_tensor(spread), plain));
}

TESSERA_RANKS_TEST_CASE("a plain tensor among lists is not written with a DTensor's value", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor p = distribute_tensor(sample({4}), mesh, {Shard(0)}, kNoSource);
  const at::Tensor plain = at::zeros({4}, on(at::kDouble));
  const ImplicitReplication guard;
  CHECK_THROWS_WITH_AS(
      at::_foreach_addcmul_(std::vector<at::Tensor>{plain}, std::vector<at::Tensor>{p}, std::vector<at::Tensor>{p}, 1),
      doctest::Contains("would be written with the value of a DTensor"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("plain running statistics are updated as a whole", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 3});
  const Tensors plain = {sample({3}, 1), sample({3}, 2).abs() + 1};
  const Tensors beside = {plain[0].clone(), plain[1].clone()};
  at::batch_norm(x, {}, {}, plain[0], plain[1], true, 0.3, 1e-5, false);
  const ImplicitReplication guard;
  at::batch_norm(distribute_tensor(x, mesh, {Shard(0)}, kNoSource), {}, {}, beside[0], beside[1], true, 0.3, 1e-5,
                 false);
  CHECK(at::allclose(beside[0], plain[0]));
  CHECK(at::allclose(beside[1], plain[1]));
}

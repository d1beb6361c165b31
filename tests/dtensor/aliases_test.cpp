// Tests what happens where a DTensor and a plain tensor, or two gradients, would share memory: autograd sees the writes
// to a plain tensor, as it does in LibTorch, and no .grad is another tensor's memory. Also tests what backward does
// where LibTorch's own functions may run twice, or under autocast.

#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr const char* kWritten = "has been modified by an inplace operation";

// Says whether the memory of both gradients is the same.
bool share(const at::Tensor& a, const at::Tensor& b) {
  const auto memory = [](const at::Tensor& t) { return is_dtensor(t) ? to_local(t) : t; };
  return memory(a).is_alias_of(memory(b));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("a write to a plain tensor whose DTensor was saved makes backward throw, as without one",
                        {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor p = leaf(sample({4, 3}));
  const at::Tensor w = from_local(p, mesh, {R});
  const at::Tensor loss = (w * w).sum();
  {
    const at::NoGradGuard no_grad;
    p.add_(1);
  }
  CHECK_THROWS_WITH(loss.backward(), doctest::Contains(kWritten));
}

TESSERA_RANKS_TEST_CASE("a write to a piece of a saved DTensor makes backward throw, by whatever way the piece came",
                        {1, 2}) {
  const DeviceMesh mesh = line();
  using Write = void (*)(const at::Tensor& y);
  const std::vector<Write> writes = {
      [](const at::Tensor& y) { to_local(y).mul_(2); },
      [](const at::Tensor& y) { to_local(y.detach()).mul_(2); },
      [](const at::Tensor& y) { to_local(y.t()).mul_(2); },
      [](const at::Tensor& y) { to_local(y.select(1, 0)).zero_(); },
      [](const at::Tensor& y) { to_local(y).t().select(0, 1).zero_(); },
  };
  for (const Placement& cut : {S0, R}) {
    for (std::size_t i = 0; i < writes.size(); ++i) {
      for (const bool recorded : {false, true}) {
        CAPTURE(to_string(cut));
        CAPTURE(i);
        CAPTURE(recorded);
        const at::Tensor x = leaf(sample({4, 3}), mesh, {cut});
        const at::Tensor y = x.exp();  // whose gradient needs y
        const at::Tensor loss = y.sum();
        {
          const at::AutoGradMode mode(recorded);
          writes[i](y);
        }
        CHECK_THROWS_WITH(loss.backward(), doctest::Contains(kWritten));
        // One that was saved after the write has the new value.
        const at::Tensor z = leaf(sample({4, 3}), mesh, {cut});
        const at::Tensor e = z.detach().exp();
        writes[i](e);
        (z * e).sum().backward();
        CHECK(same(to_local(z.grad()), to_local(e)));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("a write to a plain tensor without gradients is seen too, whichever of both is saved", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor plain = sample({4, 3});
  const at::Tensor x = from_local(plain, mesh, {S0});
  const at::Tensor w = leaf(sample({4, 3}));
  const at::Tensor first = (from_local(w, mesh, {S0}) * x).sum();
  plain.add_(1);
  CHECK_THROWS_WITH(first.backward(), doctest::Contains(kWritten));
  const at::Tensor second = (w * plain).sum();
  x.add_(1);
  CHECK_THROWS_WITH(second.backward(), doctest::Contains(kWritten));
  // The piece was copied, so that a write to the plain tensor does not reach the DTensor.
  const at::Tensor apart = sample({3, 4}).t();
  const at::Tensor third = (from_local(w, mesh, {S0}) * from_local(apart, mesh, {S0})).sum();
  apart.zero_();
  third.backward();
  CHECK(same(w.grad(), sample({3, 4}).t()));
}

TESSERA_RANKS_TEST_CASE("a write to a piece of what torch::ones_like and its like have made is seen", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({4, 3}), mesh, {S0});
  for (const at::Tensor& y : {torch::ones_like(x), torch::rand_like(x), torch::full_like(x, 2), torch::empty_like(x)}) {
    const at::Tensor w = leaf(sample({4, 3}), mesh, {S0});
    const at::Tensor loss = (w * y).sum();
    to_local(y).zero_();
    CHECK_THROWS_WITH(loss.backward(), doctest::Contains(kWritten));
  }
}

TESSERA_RANKS_TEST_CASE("a write to the piece of a view that is a copy counts as one to both", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = leaf(sample({4, 6}), mesh, {S1});
  const at::Tensor y = x.exp();
  const at::Tensor copy = y.view({3, 8});
  to_local(copy).mul_(2);
  CHECK_THROWS_WITH(full_tensor(copy), doctest::Contains("has been written since"));
  CHECK_THROWS_WITH(y.sum().backward(), doctest::Contains(kWritten));
}

TESSERA_RANKS_TEST_CASE("what LibTorch does not count as a write, backward does not refuse", {1, 2}) {
  const DeviceMesh mesh = line();
  // Writes to data() of a weight, before and after somebody has taken its piece.
  for (const bool wrapped : {false, true}) {
    const at::Tensor w =
        wrapped ? from_local(sample({4, 3}), mesh, {S0}).requires_grad_() : leaf(sample({4, 3}), mesh, {S0});
    const at::Tensor loss = (w * w).sum();
    to_local(w.detach()).sum();
    w.data().mul_(2);
    to_local(w.data()).clamp_(-1, 1);
    to_local(w.data().t()).mul_(3);
    CHECK_NOTHROW(loss.backward());
  }
  // The statistics of a batch norm change while they are saved.
  const at::Tensor input = leaf(sample({6, 4}), mesh, {R});
  const at::Tensor mean = from_local(at::zeros({4}, on(at::kDouble)), mesh, {R});
  const at::Tensor variance = spread(at::ones({4}, on(at::kDouble)), mesh, {R});
  to_local(variance);
  const auto norm = [&] { return at::batch_norm(input, {}, {}, mean, variance, true, 0.1, 1e-5, false); };
  const at::Tensor loss = (norm() * norm()).sum();
  CHECK_NOTHROW(loss.backward());
}

TESSERA_RANKS_TEST_CASE("gradients of several leaves have memory of their own, and add up over two backwards", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor c = sample({4, 6}, 2);
  const at::Tensor mine = piece_of(c, mesh, {S0});
  const at::Tensor w1 = leaf(sample({4, 6}), mesh, {S0}), w2 = leaf(sample({4, 6}, 1), mesh, {S0});
  for (int i = 0; i < 2; ++i) ((to_local(w1) + to_local(w2)) * mine).sum().backward();
  CHECK(same(to_local(w1.grad()), mine * 2));
  CHECK(same(to_local(w2.grad()), mine * 2));
  CHECK_FALSE(share(w1.grad(), w2.grad()));

  const at::Tensor a = leaf(sample({4, 6}), mesh, {R}), b = leaf(sample({4, 6}, 1), mesh, {R});
  const at::Tensor given = c.clone();
  for (int i = 0; i < 2; ++i) (a + b).backward(given);
  CHECK(same(to_local(a.grad()), c * 2));
  CHECK(same(to_local(b.grad()), c * 2));
  CHECK(same(given, c));

  const at::Tensor p = leaf(c), q = leaf(c);
  for (int i = 0; i < 2; ++i) (from_local(p, mesh, {R}) + from_local(q, mesh, {R})).backward(given);
  CHECK(same(p.grad(), c * 2));
  CHECK(same(q.grad(), c * 2));
  CHECK(same(given, c));

  const at::Tensor s = leaf(c), t = leaf(c);
  for (int i = 0; i < 2; ++i)
    (distribute_tensor(s, mesh, {R}) + distribute_tensor(t, mesh, {R})).backward(spread(c, mesh, {R}));
  CHECK(same(s.grad(), c * 2));
  CHECK(same(t.grad(), c * 2));
}

TESSERA_RANKS_TEST_CASE("so have gradients that reach their plain leaves by way of another operator", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor c = sample({4, 6}, 2);
  const at::Tensor factor = spread(c, mesh, {R});
  using Enter = std::function<at::Tensor(const at::Tensor& t)>;
  const std::vector<Enter> ways = {
      [&](const at::Tensor& t) { return from_local(t, mesh, {R}); },
      [&](const at::Tensor& t) { return from_local(t, mesh, {R}, {.grad_placements = Placements{R}}); },
      [&](const at::Tensor& t) { return distribute_tensor(t, mesh, {R}); },
  };
  for (std::size_t i = 0; i < ways.size(); ++i) {
    CAPTURE(i);
    const at::Tensor p = leaf(c), q = leaf(c);
    for (int k = 0; k < 2; ++k) ((ways[i](p + 1) + ways[i](q + 1)) * factor).sum().backward();
    CHECK(same(p.grad(), c * 2));
    CHECK(same(q.grad(), c * 2));
    CHECK_FALSE(share(p.grad(), q.grad()));
  }
  const at::Tensor given = c.clone(), p = leaf(c);
  for (int k = 0; k < 3; ++k) redistribute(from_local(p + 1, mesh, {R}), {S0}).backward(given);
  CHECK(same(p.grad(), c * 3));
  CHECK(same(given, c));
}

TESSERA_RANKS_TEST_CASE("so have those of plain operands, beside that of a DTensor", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor c = sample({4, 6}, 2);
  const at::Tensor factor = spread(c, mesh, {R});
  const at::Tensor x = leaf(c, mesh, {R}), a = leaf(c), b = leaf(c), before = leaf(c);
  for (int i = 0; i < 2; ++i) {
    const ImplicitReplication guard;
    ((x + a + b + (before + 1)) * factor).sum().backward();
  }
  CHECK(same(to_local(x.grad()), c * 2));
  for (const at::Tensor& plain : {a, b, before}) {
    CHECK(same(plain.grad(), c * 2));
    CHECK_FALSE(share(plain.grad(), x.grad()));
  }
  CHECK_FALSE(share(a.grad(), b.grad()));
  CHECK_FALSE(share(a.grad(), before.grad()));
}

TESSERA_RANKS_TEST_CASE("what the caller gives as a gradient stays as it is, on its way to a leaf by any function",
                        {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor c = sample({4, 6}, 2);
  using Function = at::Tensor (*)(const at::Tensor& w);
  const std::vector<Function> functions = {
      [](const at::Tensor& w) { return to_local(w); },
      [](const at::Tensor& w) { return to_local(w + 1); },
      [](const at::Tensor& w) { return redistribute(w, {S0}); },
      [](const at::Tensor& w) { return redistribute(w, {R}, {.grad_placements = Placements{R}}); },
      [](const at::Tensor& w) { return to_local(redistribute(w, {S0}), Placements{S0}); },
  };
  for (std::size_t i = 0; i < functions.size(); ++i) {
    CAPTURE(i);
    const at::Tensor w = leaf(c, mesh, {R});
    const at::Tensor first = functions[i](w).detach();
    const at::Tensor given = is_dtensor(first) ? c.clone() : (first.size(0) == 4 ? c : piece_of(c, mesh, {S0})).clone();
    const at::Tensor before = given.clone();
    for (int k = 0; k < 3; ++k) functions[i](w).backward(given);
    CHECK(same(to_local(w.grad()), c * 3));
    CHECK(same(given, before));
  }
}

TESSERA_RANKS_TEST_CASE("a gradient that nobody else holds is not copied where it enters or leaves a DTensor", {2, 3}) {
  const DeviceMesh mesh = line();
  const auto address = [](const at::Tensor& g) { return (is_dtensor(g) ? to_local(g) : g).const_data_ptr(); };
  const void *outer = nullptr, *inner = nullptr;
  const auto hook_both = [&](const at::Tensor& plain, const at::Tensor& dtensor) {
    plain.register_hook([&](const at::Tensor& g) { outer = address(g); });
    dtensor.register_hook([&](const at::Tensor& g) { inner = address(g); });
  };
  const at::Tensor p = leaf(sample({4, 6})) * 2;
  for (const at::Tensor& dtensor : {from_local(p, mesh, {S0}), distribute_tensor(p, mesh, {R})}) {
    outer = inner = nullptr;
    hook_both(p, dtensor);
    (dtensor * dtensor).sum().backward({}, /*retain_graph=*/true);
    CHECK(inner != nullptr);
    CHECK(inner == outer);
  }
  const at::Tensor w = leaf(sample({4, 6}), mesh, {S0});
  const at::Tensor piece = to_local(w);
  hook_both(piece, w);
  (piece * piece).sum().backward();
  CHECK(inner == outer);
  CHECK(address(w.grad()) == outer);
  // The transpose of a Linear's weight: the gradient is a view.
  const at::Tensor weight = leaf(sample({6, 4}), mesh, {S0});
  const at::Tensor turned = weight.t();
  turned.register_hook([&](const at::Tensor& g) { outer = address(g); });
  at::mm(spread(sample({3, 4}, 1), mesh, {R}), turned).pow(2).sum().backward();
  CHECK(address(weight.grad()) == outer);
  // A residual: autograd gives one tensor to both of its terms.
  const at::Tensor x = leaf(sample({4, 6}, 2)), h = x * 2;
  const at::Tensor sum = x * 3 + to_local(redistribute(from_local(h, mesh, {Partial()}), {R}));
  sum.register_hook([&](const at::Tensor& g) { outer = address(g); });
  h.register_hook([&](const at::Tensor& g) { inner = address(g); });
  sum.pow(2).sum().backward();
  CHECK(inner == outer);
}

TESSERA_RANKS_TEST_CASE("a gradient that nobody else holds becomes .grad without a copy", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor w = leaf(sample({4, 6}), mesh, {S0});
  const void* seen = nullptr;
  w.register_hook([&](const at::Tensor& g) { seen = to_local(g).const_data_ptr(); });
  (w * w).sum().backward();
  CHECK(seen == to_local(w.grad()).const_data_ptr());
  // The gradient of a transpose is a view.
  const at::Tensor x = spread(sample({5, 6}), mesh, {R});
  w.mutable_grad() = at::Tensor();
  at::matmul(x, w.t()).square().sum().backward();
  CHECK(seen == to_local(w.grad()).const_data_ptr());
}

TESSERA_RANKS_TEST_CASE("from_local may be differentiated twice where it has saved nothing", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor p = leaf(sample({4, 3}));
  const at::Tensor w = from_local(p, mesh, {S0});
  (w * 2).sum().backward();
  (w * 3).sum().backward();
  CHECK(same(p.grad(), at::full({4, 3}, 5, on(at::kDouble))));
}

TESSERA_RANKS_TEST_CASE("create_graph keeps the history of a plain gradient", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = leaf(sample({4}), mesh, {R});
  const at::Tensor v = leaf(at::ones({4}, on(at::kDouble)));
  const at::Tensor y = redistribute(x * x, {S0});
  const at::Tensor g = torch::autograd::grad({y}, {x}, {v}, true, true)[0];
  const at::Tensor got = torch::autograd::grad({full_tensor(g).sum()}, {v})[0];
  CHECK(close(got, sample({4}) * 2));
}

TESSERA_RANKS_TEST_CASE("create_graph through a piece of a product throws, since terms would be lost", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor p = leaf(sample({4}));
  const at::Tensor y = from_local(p, mesh, {Partial(ReduceOp::kProduct)}).sum();
  CHECK_THROWS_WITH(torch::autograd::grad({y}, {p}, {}, true, true),
                    doctest::Contains("would lose terms of the second derivative"));
}

TESSERA_RANKS_TEST_CASE("backward under autocast, of products that were computed without", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({2, 4, 6}, 0, at::kFloat), weight = sample({5, 6}, 1, at::kFloat);
  const at::Tensor w = leaf(weight, mesh, {S0});
  const at::Tensor y = at::linear(spread(x, mesh, {R}), w).square().sum();
  const auto device_type = mesh.device_type();
  at::autocast::set_autocast_enabled(device_type, true);
  CHECK_NOTHROW(y.backward());
  at::autocast::set_autocast_enabled(device_type, false);
  at::autocast::clear_cache();
  const at::Tensor want = leaf(weight);
  at::linear(x, want).square().sum().backward();
  CHECK((w.grad().scalar_type() == at::kFloat));
  CHECK(close(full_tensor(w.grad()), want.grad(), 1e-2));  // autocast computes what it knows in bfloat16
}

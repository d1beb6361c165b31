// redistribute_result may reduce a result in its own memory only if nobody else can read that memory.

#include <functional>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute_result.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placements kFrom = {Partial(), Partial(ReduceOp::kAvg), Partial(ReduceOp::kMax), Shard(0), Replicate()};
const Placements kTo = {Replicate(), Shard(0), Shard(1), Partial()};

// MPI reduces it in place where that is allowed; Gloo gathers the terms of a tensor of this size.
at::Tensor whole() { return sample({211, 307}); }

}  // namespace

TESSERA_RANKS_TEST_CASE("a result that nobody else holds has the value of redistribute", {1, 2, 3, 4}) {
  for (const Placement& from : kFrom) {
    for (const Placement& to : kTo) {
      for (const bool async : {false, true}) {
        CAPTURE(to_string(from));
        CAPTURE(to_string(to));
        CAPTURE(async);
        const at::Tensor moved =
            tessera::detail::redistribute_result(spread(whole(), line(), {from}), {to}, {.async = async});
        CHECK(placements_of(moved) == Placements{to});
        CHECK(close(full_tensor(moved), whole()));
        CHECK(to_local(moved).is_contiguous());
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("a result that something else holds is not written", {1, 2, 3, 4}) {
  using Holder = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<Holder> holders = {
      [](const at::Tensor& t) { return t; },
      [](const at::Tensor& t) { return t.detach(); },
      [](const at::Tensor& t) { return t.slice(1, 3); },
      [](const at::Tensor& t) { return to_local(t); },
      [](const at::Tensor& t) { return to_local(t).narrow(1, 0, 2); },
  };
  for (const Placement& from : kFrom) {
    for (std::size_t i = 0; i < holders.size(); ++i) {
      CAPTURE(to_string(from));
      CAPTURE(i);
      at::Tensor result = spread(whole(), line(), {from});
      const at::Tensor held = holders[i](result);
      const at::Tensor before = (is_dtensor(held) ? to_local(held) : held).clone();
      CHECK(close(full_tensor(tessera::detail::redistribute_result(result, {Replicate()})), whole()));
      result.reset();
      CHECK(same(is_dtensor(held) ? to_local(held) : held, before));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a result that autograd saves is not written, and the gradient is right", {2, 3}) {
  const at::Tensor plain = whole().requires_grad_();
  const auto loss = [](const at::Tensor& y) { return (y * y).sum(); };
  loss(plain.exp()).backward();
  const at::Tensor leaf = spread(whole(), line(), {Shard(0)}).requires_grad_();
  loss(tessera::detail::redistribute_result(leaf.exp(), {Replicate()})).backward();
  CHECK(close(full_tensor(leaf.grad()), plain.grad()));
  // The derivative of exp reads its result, on a mesh of one rank and of several.
  const at::Tensor same_layout = spread(whole(), line(), {Replicate()}).requires_grad_();
  loss(tessera::detail::redistribute_result(same_layout.exp(), {Shard(1)})).backward();
  CHECK(close(full_tensor(same_layout.grad()), plain.grad()));
}

TESSERA_RANKS_TEST_CASE("a result that nobody writes is a view where nothing moves, and a copy where something does",
                        {1, 2, 3}) {
  const bool alone = world()->size() == 1;
  for (const bool recorded : {false, true}) {
    CAPTURE(recorded);
    at::Tensor from = spread(whole(), line(), {Shard(0)});
    from.requires_grad_(recorded);
    const at::Tensor read = tessera::detail::redistribute_to_read(from, {Shard(1)});
    CHECK(placements_of(read) == Placements{Shard(1)});
    CHECK(close(full_tensor(read.detach()), whole()));
    CHECK(to_local(read.detach()).is_alias_of(to_local(from.detach())) == alone);
    if (!recorded) continue;
    read.square().sum().backward();
    CHECK(close(full_tensor(from.grad()), 2 * whole()));
  }
}

TESSERA_RANKS_TEST_CASE("a write to a tensor whose view autograd has saved is refused, as LibTorch refuses it", {1}) {
  const at::Tensor leaf = spread(whole(), line(), {Shard(0)}).requires_grad_();
  at::Tensor from = leaf * 1;
  const at::Tensor squared = tessera::detail::redistribute_to_read(from, {Shard(1)}).square().sum();
  from.mul_(2);
  CHECK_THROWS_WITH(squared.backward(), doctest::Contains("modified by an inplace operation"));
}

TESSERA_RANKS_TEST_CASE("a gradient that somebody else holds is not reduced in place", {1, 2, 3}) {
  // The gradient of the redistributed tensor is a sum that is pending, which backward reduces.
  const auto pending = [](const at::Tensor& y) { return (y * spread(whole(), line(), {Partial()})).sum(); };
  const at::Tensor want = whole();
  for (const int holder : {0, 1, 2, 3}) {
    CAPTURE(holder);
    const at::Tensor leaf = spread(whole(), line(), {Shard(0)}).requires_grad_();
    const at::Tensor moved = redistribute(leaf, {Replicate()});
    at::Tensor held, before;
    if (holder == 1) {
      moved.register_hook([&](const at::Tensor& grad) {
        held = grad;
        before = to_local(grad).clone();
      });
    }
    if (holder == 2) moved.retain_grad();
    // A second user of the gradient: both summands get the same one.
    const at::Tensor other = spread(whole(), line(), {Replicate()}).requires_grad_();
    pending(holder == 3 ? moved + other : moved).backward();
    CHECK(close(full_tensor(leaf.grad()), want));
    if (holder == 1) CHECK(same(to_local(held), before));
    if (holder == 2) CHECK(close(full_tensor(moved.grad()), want));
    if (holder == 3) CHECK(close(full_tensor(other.grad()), want));
  }
}

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

// Runs one block, with 2-D and 3-D input, with and without bias, under each mode that code may run in.

#include <vector>

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

const ParallelPlan kModesPlan = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};

struct Pair {
  Mlp want;
  Mlp got;
  Parallelized<Mlp> tp;
};

Pair make(bool bias, at::ScalarType dtype) {
  Mlp want(10, 16, 12, bias), got(10, 16, 12, bias);
  fill(*want, dtype);
  fill(*got, dtype);
  const DeviceMesh mesh = tp_line();
  return {want, got, parallelize_module(got, mesh, kModesPlan)};
}

// Runs `body` for every form of the block.
template <class Body>
void each_form(at::ScalarType dtype, const Body& body) {
  for (const bool bias : {true, false}) {
    for (const auto& shape : {std::vector<int64_t>{6, 10}, std::vector<int64_t>{2, 3, 10}}) {
      CAPTURE(bias);
      CAPTURE(shape.size());
      Pair pair = make(bias, dtype);
      body(pair, numbers(shape, 5, dtype));
    }
  }
}

// Runs `function` without gradients in forward, and again with them in backward.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, Parallelized<Mlp>* function) {
    ctx->saved_data["function"] = reinterpret_cast<int64_t>(function);
    ctx->save_for_backward({x});
    const at::NoGradGuard no_grad;
    return (*function)(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    auto* const function = reinterpret_cast<Parallelized<Mlp>*>(ctx->saved_data["function"].toInt());
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().set_requires_grad(true);
    torch::autograd::backward({(*function)(x)}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("a block under grad, no_grad and InferenceMode", {1, 2, 3, 4}) {
  each_form(at::kDouble, [](Pair& pair, const at::Tensor& x) {
    const at::Tensor expected = pair.want(x);
    CHECK(difference(pair.tp(x), expected) <= 1e-12);
    {
      const at::NoGradGuard no_grad;
      CHECK(difference(pair.tp(x), expected) <= 1e-12);
    }
    {
      const c10::InferenceMode inference;
      const at::Tensor y = pair.tp(x);
      CHECK(is_dtensor(y));
      CHECK(placements_of(y) == Placements{Replicate()});
      CHECK(difference(y, expected) <= 1e-12);
    }
    // Gradients work again afterwards.
    pair.tp(x).sum().backward();
    expected.sum().backward();
    check_parameters(*pair.got, *pair.want, /*gradients=*/true, 1e-12);
  });
}

TESSERA_RANKS_TEST_CASE("a block under autocast computes in bfloat16, as one process does", {1, 2, 4}) {
  each_form(at::kFloat, [](Pair& pair, const at::Tensor& x) {
    const c10::DeviceType here = device().type();
    at::autocast::set_autocast_dtype(here, at::kBFloat16);
    at::autocast::set_autocast_enabled(here, true);
    const at::Tensor expected = pair.want(x);
    const at::Tensor y = pair.tp(x);
    at::autocast::set_autocast_enabled(here, false);
    at::autocast::clear_cache();
    CHECK((y.scalar_type() == expected.scalar_type()));
    // bfloat16 has 8 bits of precision: a sum in another order differs in its last bits.
    CHECK(difference(y.to(at::kFloat), expected.to(at::kFloat)) <= 0.03);
    y.to(at::kFloat).sum().backward();
    expected.to(at::kFloat).sum().backward();
    check_parameters(*pair.got, *pair.want, /*gradients=*/true, 0.03);
  });
}

TESSERA_RANKS_TEST_CASE("a block recomputed in backward", {1, 2, 3}) {
  each_form(at::kDouble, [](Pair& pair, const at::Tensor& x) {
    at::Tensor plain = x.clone().set_requires_grad(true);
    at::Tensor mine =
        distribute_tensor(x, mesh_of(pair.got->up->weight), {Replicate()}).detach().set_requires_grad(true);
    const at::Tensor expected = pair.want(plain);
    const at::Tensor y = Recompute::apply(mine, &pair.tp);
    CHECK(difference(y, expected) <= 1e-12);
    expected.square().sum().backward();
    y.square().sum().backward();
    CHECK(difference(mine.grad(), plain.grad()) <= 1e-12);
    check_parameters(*pair.got, *pair.want, /*gradients=*/true, 1e-12);
  });
}

// One block under every mode that LibTorch runs a forward in, with 2-D and 3-D input, with and without bias.

#include <functional>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Logging.h>  // defines a CHECK of its own, so it comes before doctest
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/modes.h"
#include "tessera/mesh/comm_counter.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

DeviceMesh line() { return init_device_mesh("cpu", {world_size()}, {"tp"}, world()); }

const ParallelPlan kMlp = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};

struct Pair {
  explicit Pair(bool bias, at::ScalarType dtype = at::kDouble)
      : mesh(line()), want(6, 12, 6, bias), got(6, 12, 6, bias), tp(prepare(dtype)) {}
  Parallelized<Mlp> prepare(at::ScalarType dtype) {
    fill(*want, dtype);
    fill(*got, dtype);
    return parallelize_module(got, mesh, kMlp);
  }
  DeviceMesh mesh;
  Mlp want, got;
  Parallelized<Mlp> tp;
};

void on_every_shape(const std::function<void(bool bias, const std::vector<int64_t>& shape)>& body) {
  for (const bool bias : {true, false}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{4, 6}, std::vector<int64_t>{2, 3, 6}}) {
      CAPTURE(bias);
      CAPTURE(shape.size());
      body(bias, shape);
    }
  }
}

// Forgets what forward made and makes it again in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Forward = std::function<at::Tensor(const at::Tensor&)>;
  struct Held : torch::CustomClassHolder {
    Forward forward;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const Forward& forward) {
    ctx->save_for_backward({x});
    auto held = c10::make_intrusive<Held>();
    held->forward = forward;
    ctx->saved_data["held"] = at::IValue::make_capsule(held);
    const at::NoGradGuard no_grad;
    return forward(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::AutoGradMode grad(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().set_requires_grad(true);
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["held"].toCapsule());
    const at::Tensor y = held->forward(x);
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("a block under no_grad and under InferenceMode", {1, 2, 3}) {
  on_every_shape([](bool bias, const std::vector<int64_t>& shape) {
    Pair pair(bias);
    const at::Tensor x = numbers(shape);
    const at::Tensor want = pair.want->forward(x).detach();
    const auto check = [&](const char* mode) {
      CAPTURE(mode);
      CommCounter counter(pair.mesh);
      const at::Tensor y = pair.tp(x);
      CHECK(counter.total() == (world_size() == 1 ? 0 : 1));
      CHECK(placements_of(y) == Placements{Replicate()});
      CHECK_FALSE(y.requires_grad());
      CHECK(difference(y, want) <= 1e-12);
    };
    {
      const at::NoGradGuard no_grad;
      check("no_grad");
    }
    {
      const c10::InferenceMode inference;
      check("InferenceMode");
    }
    // And the modes left nothing behind.
    const at::Tensor y = pair.tp(x);
    CHECK(y.requires_grad());
    CHECK(difference(y, want) <= 1e-12);
  });
}

TESSERA_RANKS_TEST_CASE("a block under autocast", {1, 2}) {
  on_every_shape([](bool bias, const std::vector<int64_t>& shape) {
    Pair pair(bias, at::kFloat);
    const at::Tensor x = numbers(shape, 1, at::kFloat);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const at::Tensor want = pair.want->forward(x), got = pair.tp(x);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    CHECK((got.scalar_type() == at::kBFloat16));
    CHECK(placements_of(got) == Placements{Replicate()});
    CHECK(difference(got, want) <= 0.02);
    want.square().mean().backward();
    got.square().mean().backward();
    CHECK((pair.got->up->weight.grad().scalar_type() == at::kFloat));
    check_parameters(*pair.got, *pair.want, /*gradients=*/true, 0.05);
  });
}

TESSERA_RANKS_TEST_CASE("a block recomputed in backward", {1, 2, 3}) {
  on_every_shape([](bool bias, const std::vector<int64_t>& shape) {
    Pair pair(bias);
    at::Tensor want_x = numbers(shape).set_requires_grad(true), got_x = numbers(shape).set_requires_grad(true);
    pair.want->forward(want_x).square().mean().backward();
    const at::Tensor x = distribute_tensor(got_x, pair.mesh, {Replicate()}, kNoSource);
    const at::Tensor y = Recomputed::apply(x, [&](const at::Tensor& t) { return pair.tp(t); });
    y.square().mean().backward();
    CHECK(difference(got_x.grad(), want_x.grad()) <= 1e-12);
    check_parameters(*pair.got, *pair.want, /*gradients=*/true, 1e-12);
  });
}

TESSERA_RANKS_TEST_CASE("torch::nn::TransformerEncoder, its feed-forward and norms styled, equals one process",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto make = [] {
    torch::nn::TransformerEncoderLayer layer(
        torch::nn::TransformerEncoderLayerOptions(12, 3).dim_feedforward(20).dropout(0));
    torch::nn::TransformerEncoder encoder(torch::nn::TransformerEncoderOptions(layer, 2));
    fill(*encoder);
    return encoder;
  };
  torch::nn::TransformerEncoder want = make(), got = make();
  auto tp = parallelize_module(got, mesh,
                               {{"layers.*.linear1", ColwiseParallel()},
                                {"layers.*.linear2", RowwiseParallel()},
                                {"layers.*.norm?", SequenceParallel(0)}});
  const at::Tensor x = numbers({5, 2, 12});
  at::Tensor want_x = x.clone().set_requires_grad(true), got_x = x.clone().set_requires_grad(true);
  const at::Tensor mask = torch::nn::TransformerImpl::generate_square_subsequent_mask(5).to(at::kDouble);
  const at::Tensor expected = want->forward(want_x, mask);
  const at::Tensor y = tp(distribute_tensor(got_x, mesh, {Replicate()}, kNoSource), mask, at::Tensor());
  CHECK(difference(y, expected) <= 1e-12);
  expected.square().mean().backward();
  y.square().mean().backward();
  CHECK(difference(got_x.grad(), want_x.grad()) <= 1e-12);
  // The gradient of a key's bias is zero but for rounding; in_proj_bias holds it.
  check_parameters(*got, *want, /*gradients=*/true, 1e-12);
}

TESSERA_RANKS_TEST_CASE("with dropout on, replicas agree on every rank and shards draw differently", {2, 4}) {
  const DeviceMesh mesh = line();
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Dropout(0.5), torch::nn::Linear(64, 8),
                              torch::nn::Dropout(0.5));
  fill(*model);
  auto tp = parallelize_module(model, mesh, {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
  const at::Tensor y = tp(numbers({16, 8}));
  from_local(to_local(y), mesh, {Replicate()}, {.check = true});  // throws where replicas differ
  const at::Tensor kept =
      to_local(torch::nn::Dropout(0.5)(distribute_tensor(at::ones({16, 64 * world_size()}), mesh, {Shard(1)})));
  const at::Tensor all = full_tensor(from_local(kept, mesh, {Shard(0)})).view({world_size(), 16, 64});
  for (int64_t i = 1; i < world_size(); ++i) CHECK_FALSE(all[i].equal(all[0]));
}

namespace {

// A norm of the user's own: its weight meets the activation by mul.
struct RmsNormImpl : torch::nn::Module {
  explicit RmsNormImpl(int64_t d) { weight = register_parameter("weight", at::ones({d})); }
  at::Tensor forward(const at::Tensor& x) { return x * (x.square().mean(-1, true) + 1e-6).rsqrt() * weight; }
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

}  // namespace

TESSERA_RANKS_TEST_CASE("SequenceParallel on a norm of the user's own: DTensors go through, plain pieces are refused",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  RmsNorm want(6), got(6);
  fill(*want);
  fill(*got);
  auto tp = parallelize_module(got, mesh, SequenceParallel());
  const at::Tensor x = numbers({2, 5, 6});
  at::Tensor cut = distribute_tensor(x, mesh, {Shard(1)}).detach().set_requires_grad(true);
  const at::Tensor expected = want->forward(x), y = tp(cut);
  CHECK(placements_of(y) == Placements{Shard(1)});
  CHECK(difference(y, expected) <= 1e-12);
  expected.square().sum().backward();
  y.square().sum().backward();
  check_parameters(*got, *want, /*gradients=*/true, 1e-12);
  CHECK_THROWS_WITH_AS(tp(x),
                       "aten::mul: a plain tensor [2, 5, 6] meets weight, whose style says that it is this rank's piece, "
                       "S(1); give a DTensor, by from_local(piece, mesh, placements)",
                       std::invalid_argument);
}

// Tests torch::nn::MultiheadAttention sharded by heads, alone and in LibTorch's own transformers, against one process.

#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/training/training.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::MultiheadAttention;
using torch::nn::MultiheadAttentionOptions;
using torch::nn::TransformerEncoder;

constexpr int64_t kLayers = 2;

const ParallelPlan kAttentionPlan = {{"layers.*.self_attn", ColwiseParallel()},
                                     {"layers.*.linear1", ColwiseParallel()},
                                     {"layers.*.linear2", RowwiseParallel()}};

TransformerEncoder make_attending(int64_t heads, double dropout) {
  const auto layer = torch::nn::TransformerEncoderLayerOptions(kWidth, heads).dim_feedforward(40).dropout(dropout);
  return TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, kLayers));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("TransformerEncoder by heads equals one process: outputs, gradients, three steps",
                        {1, 2, 3, 4}) {
  for (const int64_t heads : {12, 4, 2}) {  // even; uneven on three ranks; fewer heads than ranks
    CAPTURE(heads);
    train_sgd([&] { return make_attending(heads, 0); }, kAttentionPlan, {tp_line(), {Replicate()}}, {7, 3, kWidth});
  }
}

TESSERA_RANKS_TEST_CASE("TransformerEncoder by heads on data x tensor, uneven once", {4}) {
  for (const int64_t batch : {4, 3}) {
    CAPTURE(batch);
    train_sgd([] { return make_attending(4, 0); }, kAttentionPlan, {grid(), {Shard(1), Replicate()}},
              {7, batch, kWidth});
  }
}

TESSERA_RANKS_TEST_CASE("TransformerEncoder by heads cut along an uneven sequence", {2, 3, 4}) {
  const ParallelPlan plan = {{"layers.*.self_attn", ColwiseParallel({.output_layouts = Shard(0)})},
                             {"layers.*.linear1", ColwiseParallel()},
                             {"layers.*.linear2", RowwiseParallel({.output_layouts = Shard(0)})},
                             {"layers.*.norm?", SequenceParallel(0)}};
  train_sgd([] { return make_attending(12, 0); }, plan, {tp_line(), {Shard(0)}}, {7, 3, kWidth});
}

TESSERA_RANKS_TEST_CASE("two all-reduces per layer under Strict, dropout on, forward; and as many backward", {2, 4}) {
  const DeviceMesh mesh = tp_line();
  TransformerEncoder encoder = make_attending(4, 0.1);
  fill(*encoder);
  auto tp = parallelize_module(encoder, mesh, kAttentionPlan);
  const at::Tensor x = numbers({7, 3, kWidth}).set_requires_grad(true);
  CommCounter counter(mesh);
  const Strict strict;
  const at::Tensor y = tp(x);
  CAPTURE(counter.to_string());
  CHECK(counter.total() == 2 * kLayers);
  CHECK(counter.count("all_reduce") == 2 * kLayers);
  CHECK(counter.count_by_path("layers.0.self_attn.out_proj.weight") == 1);
  counter.reset();
  y.square().mean().backward();
  CAPTURE(counter.to_string());
  CHECK(counter.total() == 2 * kLayers);
  CHECK(counter.count("all_reduce") == 2 * kLayers);
}

namespace {

// Returns the output, then the gradients of the input and of all parameters, of one training step.
std::vector<at::Tensor> dropped_step(const DeviceMesh& mesh) {
  TransformerEncoder encoder = make_attending(4, 0.1);
  fill(*encoder);
  auto tp = parallelize_module(encoder, mesh, kAttentionPlan);
  manual_seed(5, mesh.world());
  const at::Tensor x = numbers({7, 3, kWidth}).set_requires_grad(true);
  const at::Tensor y = tp(x);
  y.square().mean().backward();
  std::vector<at::Tensor> out = {whole_value(y), whole_value(x.grad())};
  for (const at::Tensor& p : encoder->parameters()) out.push_back(whole_value(p.grad()));
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("TransformerEncoder with dropout draws as one rank does", {2, 3, 4}) {
  std::vector<at::Tensor> want;
  run_in_process(1, [&](const std::shared_ptr<World>& alone) {
    want = dropped_step(init_device_mesh(device_name(), {1}, {"tp"}, alone));
  });
  const std::vector<at::Tensor> got = dropped_step(tp_line());
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CHECK(difference(got[i], want[i]) <= 1e-12);
  }
  // This shows that dropout was on.
  TransformerEncoder plain = make_attending(4, 0);
  fill(*plain);
  CHECK(difference(got[0], plain->forward(numbers({7, 3, kWidth}))) > 1e-3);
}

namespace {

struct Form {
  std::string name;
  MultiheadAttentionOptions options;
  bool padded = false, masked = false;
};

std::vector<Form> forms() {
  const auto options = [] { return MultiheadAttentionOptions(kWidth, 4); };
  return {{"plain", options()},
          {"no bias", options().bias(false)},
          {"widths of its own", options().kdim(10).vdim(10)},
          {"widths of its own, no bias", options().kdim(10).vdim(10).bias(false)},
          {"bias_k and bias_v", options().add_bias_kv(true), true, true},
          {"zeros to attend to", options().add_zero_attn(true), true, true},
          {"masks", options(), true, true}};
}

// The three ways in which the layer packs projections: one input, equal keys and values, all different.
struct Inputs {
  at::Tensor query, key, value;
};

std::vector<Inputs> inputs_of(const Form& form) {
  const int64_t width = form.options.kdim();
  const at::Tensor q = numbers({5, 3, kWidth}, 1), k = numbers({6, 3, width}, 2), v = numbers({6, 3, width}, 3);
  if (width != kWidth) return {{q, k, k}, {q, k, v}};
  return {{q, q, q}, {q, k, k}, {q, k, v}};
}

struct Attended {
  at::Tensor out, weights, query, key, value;  // query, key and value hold gradients
};

Attended attend(MultiheadAttention& module, const Form& form, const Inputs& x, bool average) {
  const auto leaf = [](const at::Tensor& t) { return t.detach().clone().set_requires_grad(true); };
  Attended a;
  a.query = leaf(x.query);
  a.key = x.key.is_same(x.query) ? a.query : leaf(x.key);
  a.value = x.value.is_same(x.key) ? a.key : leaf(x.value);
  at::Tensor padding, mask;
  if (form.padded) {
    padding = at::zeros({3, x.key.size(0)}, on(at::kBool));
    padding.select(0, 1).narrow(0, x.key.size(0) - 2, 2).fill_(true);
  }
  if (form.masked) mask = numbers({x.query.size(0), x.key.size(0)}, 4);
  std::tie(a.out, a.weights) = module->forward(a.query, a.key, a.value, padding, true, mask, average);
  return a;
}

void check_form(const Form& form, const Inputs& x, bool average) {
  MultiheadAttention want(form.options), got(form.options);
  fill(*want);
  fill(*got);
  const DeviceMesh mesh = tp_line();
  parallelize_module(got, mesh, {{"", ColwiseParallel()}});
  const Attended plain = attend(want, form, x, average);
  const ImplicitReplication guard;
  const Strict strict;
  CommCounter counter(mesh);
  const Attended mine = attend(got, form, x, average);
  CAPTURE(counter.to_string());
  CHECK(counter.count("all_reduce") == (mesh.size() > 1 ? 1 : 0));
  CHECK(counter.total() == counter.count("all_reduce"));
  CHECK(difference(mine.out, plain.out) <= 1e-12);
  CHECK(difference(mine.weights, plain.weights) <= 1e-12);
  const auto loss = [](const Attended& a) {
    return a.out.square().mean() + (a.weights * numbers(a.weights.sizes().vec(), 9)).sum();
  };
  loss(plain).backward();
  loss(mine).backward();
  CHECK(difference(mine.query.grad(), plain.query.grad()) <= 1e-12);
  CHECK(difference(mine.key.grad(), plain.key.grad()) <= 1e-12);
  CHECK(difference(mine.value.grad(), plain.value.grad()) <= 1e-12);
  check_parameters(*got, *want, /*gradients=*/true, 1e-12);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("MultiheadAttention by heads in all its forms: one all-reduce", {1, 2, 3, 4}) {
  for (const Form& form : forms()) {
    CAPTURE(form.name);
    std::size_t which = 0;
    for (const Inputs& x : inputs_of(form)) {
      CAPTURE(which);
      for (const bool average : {true, false}) check_form(form, x, average);
      ++which;
    }
  }
}

TESSERA_RANKS_TEST_CASE("Transformer by heads, encoder and decoder, equals one process", {1, 2, 3, 4}) {
  const auto make = [] {
    return torch::nn::Transformer(
        torch::nn::TransformerOptions(kWidth, 4, 2, 2).dim_feedforward(40).dropout(0).activation(torch::kGELU));
  };
  auto want = make(), got = make();
  fill(*want);
  fill(*got);
  auto tp = parallelize_module(got, tp_line(),
                               {{"*.layers.*.self_attn", ColwiseParallel()},
                                {"decoder.layers.*.multihead_attn", ColwiseParallel()},
                                {"*.layers.*.linear1", ColwiseParallel()},
                                {"*.layers.*.linear2", RowwiseParallel()}});
  const at::Tensor source = numbers({5, 3, kWidth}, 1), target = numbers({4, 3, kWidth}, 2);
  const at::Tensor expected = want->forward(source, target);
  CommCounter counter(tp_line());
  const Strict strict;
  const at::Tensor y = tp(source, target);
  CAPTURE(counter.to_string());
  CHECK(counter.total() == (world_size() > 1 ? 2 * 2 + 2 * 3 : 0));
  CHECK(difference(y, expected) <= 1e-12);
  expected.square().mean().backward();
  y.square().mean().backward();
  check_parameters(*got, *want, /*gradients=*/true, 1e-12);
}

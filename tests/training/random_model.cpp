#include "tessera/tests/training/random_model.h"

#include <array>

#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <fmt/format.h>

#include "tessera/layers/activation_checkpoint.h"
#include "tessera/tests/dtensor/values.h"

namespace tessera::testing {
namespace {

using Kind = PartShape::Kind;

constexpr std::array<const char*, 4> kKinds = {"MLP", "gated MLP", "attention", "linear layer"};

}  // namespace

ModelShape random_shape(Random& random) {
  ModelShape out;
  out.length = 3 + pick(random, 4);
  out.hidden = 7 + pick(random, 6);
  out.heads = chance(random, 2) ? 4 : 3;
  out.tied = chance(random, 4);
  const int64_t parts = 1 + pick(random, 3);
  for (int64_t i = 0; i < parts; ++i) {
    PartShape part;
    part.kind = static_cast<Kind>(pick(random, static_cast<int64_t>(kKinds.size())));
    part.norm = !chance(random, 4);
    part.bias = chance(random, 2);
    part.checkpointed = chance(random, 4);
    part.every = chance(random, 5) ? 2 : 1;
    out.parts.push_back(part);
  }
  return out;
}

std::string to_string(const ModelShape& shape) {
  std::string out = fmt::format("a model of length {}, hidden {}, {} heads{}:\n", shape.length, shape.hidden,
                                shape.heads, shape.tied ? ", a tied head" : "");
  for (const PartShape& part : shape.parts) {
    out += fmt::format("  {}{}{}{}{}\n", kKinds[static_cast<std::size_t>(part.kind)], part.norm ? " with a norm" : "",
                       part.bias ? ", biases" : "", part.checkpointed ? ", checkpointed" : "",
                       part.every > 1 ? ", in every other step" : "");
  }
  return out;
}

PartImpl::PartImpl(const ModelShape& shape, const PartShape& of) : part(of), heads(shape.heads) {
  if (part.norm) norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
  const auto linear = [&](const char* name, int64_t in, int64_t features) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, features).bias(part.bias)));
  };
  if (part.kind == Kind::kAttention) {
    q = linear("q", shape.width, shape.width);
    k = linear("k", shape.width, shape.width);
    v = linear("v", shape.width, shape.width);
    out = linear("out", shape.width, shape.width);
    return;
  }
  const bool square = part.kind == Kind::kLinear;
  up = linear("up", shape.width, square ? shape.width : shape.hidden);
  if (part.kind == Kind::kGated) gate = linear("gate", shape.width, shape.hidden);
  if (!square) down = linear("down", shape.hidden, shape.width);
}

at::Tensor PartImpl::forward(const at::Tensor& x) { return x + computed(part.norm ? norm(x) : x); }

at::Tensor PartImpl::computed(const at::Tensor& h) {
  switch (part.kind) {
    case Kind::kMlp: return down(at::gelu(up(h)));
    case Kind::kGated: return down(at::silu(gate(h)) * up(h));
    case Kind::kLinear: return at::tanh(up(h));
    case Kind::kAttention: break;
  }
  const at::Tensor mixed = at::scaled_dot_product_attention(by_heads(q(h)), by_heads(k(h)), by_heads(v(h)), {},
                                                            /*dropout_p=*/0.0, /*is_causal=*/true);
  return out(mixed.transpose(1, 2).reshape(h.sizes()));
}

at::Tensor PartImpl::by_heads(const at::Tensor& x) const {
  return x.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
}

RandomModelImpl::RandomModelImpl(const ModelShape& of, unsigned seed) : shape(of) {
  embed = register_module("embed", torch::nn::Embedding(shape.vocabulary, shape.width));
  for (std::size_t i = 0; i < shape.parts.size(); ++i) {
    parts.push_back(register_module(fmt::format("part{}", i), std::make_shared<PartImpl>(shape, shape.parts[i])));
  }
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
  if (!shape.tied) {
    const auto options = torch::nn::LinearOptions(shape.width, shape.vocabulary).bias(false);
    head = register_module("head", torch::nn::Linear(options));
  }
  to(at::kDouble);
  const torch::NoGradGuard no_grad;
  int64_t next = seed % 50;
  for (const at::Tensor& p : parameters()) p.copy_(sample(p.sizes(), next++) * 0.4 + (p.dim() == 1 ? 0.3 : 0));
}

at::Tensor RandomModelImpl::forward(const at::Tensor& ids, int64_t step) {
  at::Tensor x = embed(ids);
  for (const std::shared_ptr<PartImpl>& each : parts) {
    if (step % each->part.every != 0) continue;
    const bool again = each->part.checkpointed && at::GradMode::is_enabled();
    x = again ? checkpoint([&](const at::Tensor& h) { return each->forward(h); }, x) : each->forward(x);
  }
  x = norm(x);
  return shape.tied ? at::linear(x, embed->weight) : head(x);
}

}  // namespace tessera::testing

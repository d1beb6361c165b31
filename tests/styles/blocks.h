#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/dtensor/whole_value.h"
#include "tessera/tests/harness/device.h"

// torch::nn code as users write it for one process, and helpers of its tests.
namespace tessera::testing {

struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t in, int64_t hidden, int64_t out, bool bias = true)
      : up(register_module("up", torch::nn::Linear(torch::nn::LinearOptions(in, hidden).bias(bias)))),
        down(register_module("down", torch::nn::Linear(torch::nn::LinearOptions(hidden, out).bias(bias)))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up->forward(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Mlp);

// Has separate q, k, v; maps x [b, t, d] to [b, t, d].
struct AttentionImpl : torch::nn::Module {
  AttentionImpl(int64_t d, int64_t heads_count)
      : heads(heads_count),
        wq(register_module("wq", torch::nn::Linear(d, d))),
        wk(register_module("wk", torch::nn::Linear(d, d))),
        wv(register_module("wv", torch::nn::Linear(d, d))),
        wo(register_module("wo", torch::nn::Linear(d, d))) {}

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor q = split(wq(x)), k = split(wk(x)), v = split(wv(x));
    const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
    const at::Tensor weights = at::softmax(at::matmul(q, k.transpose(-2, -1)) * scale, -1);
    const at::Tensor mixed = at::matmul(weights, v).transpose(1, 2).reshape({x.size(0), x.size(1), x.size(2)});
    return wo(mixed);
  }
  at::Tensor split(const at::Tensor& x) const {
    return x.view({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
  }
  int64_t heads;
  torch::nn::Linear wq, wk, wv, wo;
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t d, int64_t heads, int64_t hidden)
      : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        attn(register_module("attn", Attention(d, heads))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        mlp(register_module("mlp", Mlp(d, hidden, d))) {}
  at::Tensor forward(at::Tensor x) {
    x = x + attn(norm1(x));
    return x + mlp(norm2(x));
  }
  torch::nn::LayerNorm norm1;
  Attention attn;
  torch::nn::LayerNorm norm2;
  Mlp mlp;
};
TORCH_MODULE(Block);

// Returns random numbers that are equal on every rank and in every process.
inline at::Tensor numbers(std::vector<int64_t> shape, uint64_t seed = 1, at::ScalarType dtype = at::kDouble) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::kDouble).to(device(), dtype);
}

// Gives every parameter values that are equal on every rank; a norm's weight is not 1 and its bias not 0.
inline void fill(torch::nn::Module& module, at::ScalarType dtype = at::kDouble) {
  const at::NoGradGuard no_grad;
  module.to(device(), dtype);
  const at::Generator draws = at::detail::createCPUGenerator(7);
  for (at::Tensor& p : module.parameters()) p.copy_(at::randn(p.sizes(), draws, at::kDouble) * 0.3);
}

// Returns the largest difference over the largest magnitude of `want`: 0 without elements, and 1e300 where dtypes or
// sizes differ. Communicates for DTensors.
inline double difference(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor have = whole_value(got);
  if (have.scalar_type() != want.scalar_type() || have.sizes() != want.sizes()) return 1e300;
  if (want.numel() == 0) return 0;
  const double scale = want.abs().max().item<double>();
  const double worst = (have - want.detach()).abs().max().item<double>();
  return worst / (scale > 0 ? scale : 1.0);
}

// Rows [begin, end) of the parameters whose name ends with `name`; an `end` of -1 stands for the number of rows. Their
// true gradient is zero, so that rounding alone remains.
struct Rows {
  std::string name = "-";
  int64_t begin = 0;
  int64_t end = -1;

  bool are_in(const std::string& key) const { return key.ends_with(name); }
  at::Tensor of(const at::Tensor& t) const { return t.detach().narrow(0, begin, (end < 0 ? t.size(0) : end) - begin); }
  at::Tensor zeroed(const std::string& key, const at::Tensor& t) const {
    if (!are_in(key)) return t;
    const at::Tensor copy = t.detach().clone();
    of(copy).zero_();
    return copy;
  }
};

// Returns the largest magnitude among the gradients of a module of plain tensors.
inline double largest_gradient(const torch::nn::Module& module) {
  double largest = 0;
  for (const at::Tensor& p : module.parameters()) {
    if (p.grad().defined()) largest = std::max(largest, p.grad().abs().max().item<double>());
  }
  return largest;
}

// Returns the most by which parameters whose true gradient is zero may differ after four steps of SGD, or of AdamW with
// its default options. AdamW divides a gradient by the sum of its size and 1e-8. In double the rounding of a gradient
// is about 1e-16, and a step less than 1e-5 of lr = 1e-3 as long as it is below 1e-13. In other dtypes rounding may
// exceed 1e-8, so that each step moves both parameters by lr, in any direction.
inline double most_apart(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-7 : 0.01; }

// Compares parameters, or their gradients, of two equal modules: each relative to its own largest magnitude. The rows
// in `except` are left out of this. Their gradients may differ by `tolerance` of the largest gradient of all
// parameters, and their values by most_apart().
inline void check_parameters(const torch::nn::Module& got, const torch::nn::Module& want, bool gradients,
                             double tolerance, const Rows& except = {}) {
  const auto wanted = want.named_parameters();
  for (const auto& item : got.named_parameters()) {
    CAPTURE(item.key());
    const at::Tensor have = whole_value(gradients ? item.value().grad() : item.value());
    const at::Tensor expected = gradients ? wanted[item.key()].grad() : wanted[item.key()];
    const double worst = difference(except.zeroed(item.key(), have), except.zeroed(item.key(), expected));
    CAPTURE(worst);
    CHECK(worst <= tolerance);
    if (!except.are_in(item.key())) continue;
    const double apart = (except.of(have) - except.of(expected)).abs().max().item<double>();  // NaN if there is one
    const double most = gradients ? tolerance * largest_gradient(want) : most_apart(expected.scalar_type());
    CAPTURE(apart);
    CHECK(apart <= most);
  }
}

}  // namespace tessera::testing

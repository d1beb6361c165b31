// Runs the operator that torch.nn.MultiheadAttention calls where no gradient is asked for. It is written in other
// operators, so that a style's contracts and cut heads apply. Where a mask is true, nothing is attended to. Mask type 0
// is for positions, type 1 for padded keys.

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/linear.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

using Optional = std::optional<at::Tensor>;

// Throws where LibTorch does, rather than broadcast a mask. `scores` are (batch, heads, length, length).
void check_mask(const at::Tensor& mask, int64_t type, const std::vector<int64_t>& scores) {
  const std::vector<std::vector<int64_t>> wanted = {{scores[2], scores[3]}, {scores[0], scores[3]}, scores};
  if (type < 0 || type > 2 || mask.sizes() == at::IntArrayRef(wanted[static_cast<std::size_t>(type)])) return;
  throw std::invalid_argument(
      fmt::format("_native_multi_head_attention: a mask of [{}] with mask_type {}; give one of [{}]",
                  fmt::join(mask.sizes(), ", "), type, fmt::join(wanted[static_cast<std::size_t>(type)], ", ")));
}

std::tuple<at::Tensor, at::Tensor> native_attention(const at::Tensor& query, const at::Tensor& key,
                                                    const at::Tensor& value, int64_t embed_dim, int64_t heads,
                                                    const at::Tensor& in_weight, const at::Tensor& in_bias,
                                                    const at::Tensor& out_weight, const at::Tensor& out_bias,
                                                    const Optional& mask, bool need_weights, bool average,
                                                    std::optional<int64_t> mask_type) {
  const bool masked = mask && mask->defined();
  if (query.dim() != 3 || query.sizes() != key.sizes() || key.sizes() != value.sizes()) {
    throw std::invalid_argument(fmt::format(
        "_native_multi_head_attention: query [{}], key [{}], value [{}]; give three tensors of one shape, [batch, "
        "length, features]",
        fmt::join(query.sizes(), ", "), fmt::join(key.sizes(), ", "), fmt::join(value.sizes(), ", ")));
  }
  if (masked && !mask_type) {
    throw std::invalid_argument(
        "_native_multi_head_attention: a mask without mask_type; give 0 for a mask of positions, 1 for one of keys");
  }
  if (masked) check_mask(*mask, *mask_type, {query.size(0), heads, query.size(1), query.size(1)});
  const std::vector<at::Tensor> weights = in_weight.chunk(3), biases = in_bias.chunk(3);
  const int64_t head_dim = embed_dim / heads;
  const auto project = [&](const at::Tensor& x, std::size_t i) {
    return at::linear(x, weights[i], biases[i]).unflatten(-1, {heads, head_dim}).transpose(1, 2);
  };
  const at::Tensor q = project(query, 0), k = project(key, 1), v = project(value, 2);
  at::Tensor scores = q.matmul(k.transpose(-2, -1)).div(std::sqrt(static_cast<double>(head_dim)));
  if (masked) {
    const at::Tensor hidden = mask_type == 1 ? mask->unsqueeze(1).unsqueeze(1) : *mask;
    scores = scores.masked_fill(hidden.to(at::kBool), -std::numeric_limits<double>::infinity());
  }
  const at::Tensor attended = scores.softmax(-1);
  const at::Tensor out = at::linear(attended.matmul(v).transpose(1, 2).flatten(2), out_weight, out_bias);
  if (!need_weights) return {out, at::Tensor()};
  return {out, average ? attended.mean(1) : attended};
}

// Does the same where autograd is excluded.
bool native_attention_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (writes(op)) return false;
  const torch::jit::Stack a = take_args(op, stack);
  auto [out, weights] =
      native_attention(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toInt(), a[4].toInt(), a[5].toTensor(),
                       a[6].toTensor(), a[7].toTensor(), a[8].toTensor(), a[9].toOptional<at::Tensor>(), a[10].toBool(),
                       a[11].toBool(), a[12].toOptional<int64_t>());
  give(op, stack, torch::jit::Stack{std::move(out), std::move(weights)});
  return true;
}
[[maybe_unused]] const bool kRegistered =
    register_decomposition("_native_multi_head_attention", native_attention_boxed);
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { m.impl("_native_multi_head_attention", native_attention); }

}  // namespace
}  // namespace tessera

// A layer of torch.nn.TransformerEncoder in one operator, which TorchScript calls in eval() where no gradient is asked
// for. It is written in other operators, so that a style's contracts and cut heads apply.

#include <optional>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_native_multi_head_attention.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor encoder_layer(const at::Tensor& src, int64_t embed_dim, int64_t heads, const at::Tensor& in_weight,
                         const at::Tensor& in_bias, const at::Tensor& out_weight, const at::Tensor& out_bias,
                         bool use_gelu, bool norm_first, double eps, const at::Tensor& norm1_weight,
                         const at::Tensor& norm1_bias, const at::Tensor& norm2_weight, const at::Tensor& norm2_bias,
                         const at::Tensor& up_weight, const at::Tensor& up_bias, const at::Tensor& down_weight,
                         const at::Tensor& down_bias, const Optional& mask, std::optional<int64_t> mask_type) {
  const auto norm1 = [&](const at::Tensor& x) { return at::layer_norm(x, {embed_dim}, norm1_weight, norm1_bias, eps); };
  const auto norm2 = [&](const at::Tensor& x) { return at::layer_norm(x, {embed_dim}, norm2_weight, norm2_bias, eps); };
  const auto attend = [&](const at::Tensor& x) {
    return std::get<0>(at::_native_multi_head_attention(x, x, x, embed_dim, heads, in_weight, in_bias, out_weight,
                                                        out_bias, mask, /*need_weights=*/false,
                                                        /*average_attn_weights=*/true, mask_type));
  };
  const auto feed_forward = [&](const at::Tensor& x) {
    const at::Tensor up = at::linear(x, up_weight, up_bias);
    return at::linear(use_gelu ? at::gelu(up) : at::relu(up), down_weight, down_bias);
  };
  if (norm_first) {
    const at::Tensor x = src + attend(norm1(src));
    return x + feed_forward(norm2(x));
  }
  const at::Tensor x = norm1(src + attend(src));
  return norm2(x + feed_forward(x));
}

// Does the same where autograd is excluded.
bool encoder_layer_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (writes(op)) return false;
  const torch::jit::Stack a = take_args(op, stack);
  const auto t = [&](std::size_t i) { return a[i].toTensor(); };
  give(op, stack,
       torch::jit::Stack{encoder_layer(t(0), a[1].toInt(), a[2].toInt(), t(3), t(4), t(5), t(6), a[7].toBool(),
                                       a[8].toBool(), a[9].toDouble(), t(10), t(11), t(12), t(13), t(14), t(15), t(16),
                                       t(17), a[18].toOptional<at::Tensor>(), a[19].toOptional<int64_t>())});
  return true;
}

[[maybe_unused]] const bool kRegistered = register_decomposition("_transformer_encoder_layer_fwd", encoder_layer_boxed);
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { m.impl("_transformer_encoder_layer_fwd", encoder_layer); }

}  // namespace
}  // namespace tessera

// Attention above the kernels that LibTorch picks.

#include <limits>
#include <optional>
#include <tuple>

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/scaled_dot_product_attention_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "tessera/dtensor/modes.h"
#include "tessera/dtensor/tensor.h"

namespace tessera {
namespace {

using Optional = std::optional<at::Tensor>;

bool is_plain(const at::Tensor& t) { return t.defined() && !detail::is_dtensor(t); }

// LibTorch makes a causal mask of its own, a plain tensor that every rank has. The caller's tensors are not taken for such.
std::tuple<at::Tensor, at::Tensor> attention_math(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                  const Optional& mask, double dropout, bool causal,
                                                  const Optional& dropout_mask, std::optional<double> scale, bool grouped) {
  const bool any_plain = is_plain(query) || is_plain(key) || is_plain(value) || (dropout_mask && is_plain(*dropout_mask));
  const ImplicitReplication own_mask((causal && !any_plain) || ImplicitReplication::enabled());
  return at::native::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, dropout_mask, scale,
                                                        grouped);
}

// What a mask of truth values adds to the scores.
Optional as_terms(const Optional& mask, at::ScalarType dtype) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  return at::zeros_like(*mask, mask->options().dtype(dtype)).masked_fill(mask->logical_not(), kNever);
}

// With dropout always in terms of other operators, as LibTorch has it on a CPU: its kernels for a GPU draw numbers inside, and those depend
// on where the pieces lie.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& mask,
                     double dropout, bool causal, std::optional<double> scale, bool grouped) {
  if (dropout <= 0) {
    return at::compositeimplicitautograd::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale,
                                                                       grouped);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, as_terms(mask, query.scalar_type()), dropout,
                                                            causal, std::nullopt, scale, grouped));
}

void register_composites(torch::Library& m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("_scaled_dot_product_attention_math", attention_math);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { register_composites(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { register_composites(m); }

}  // namespace
}  // namespace tessera

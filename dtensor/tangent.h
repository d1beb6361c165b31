#pragma once

#include <algorithm>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/dtensor/core/spec.h"

// Forward-mode derivatives. A tensor that is differentiated forward has a tangent, which LibTorch keeps with its
// autograd data and computes by each operator's own formula. These functions serve the library's own functions, for
// which LibTorch has no formula.
namespace tessera::detail {

// Returns false for most tensors without one, at little cost: has_tangent, which LibTorch answers, takes a lock for the
// others. A view may have its base's tangent, and keep none yet.
inline bool may_have_tangent(const at::Tensor& t) {
  const auto* const autograd = static_cast<torch::autograd::AutogradMeta*>(t.unsafeGetTensorImpl()->autograd_meta());
  return autograd != nullptr && (autograd->fw_grad_ != nullptr || autograd->is_view_);
}

inline bool has_tangent(const at::Tensor& t) { return may_have_tangent(t) && t._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const std::optional<at::Tensor>& t) { return t && has_tangent(*t); }

inline bool has_tangent(at::TensorList list) {
  return std::ranges::any_of(list, [](const at::Tensor& t) { return has_tangent(t); });
}

// Says whether this process computes forward-mode derivatives now.
bool in_forward_mode();

// Returns `t` without its tangent; backward differentiates through it.
at::Tensor primal_of(const at::Tensor& t);
// Returns the tangent of `t`, which has one.
at::Tensor tangent_of(const at::Tensor& t);
// Returns `primal` with this tangent.
at::Tensor with_tangent(const at::Tensor& primal, const at::Tensor& tangent);
// Returns `t` itself if it has a tangent or its dtype has no derivatives; else `t` with a tangent of zeros.
at::Tensor with_some_tangent(const at::Tensor& t);

// Returns linear(t), with its tangent if `t` has one. `linear` is a linear function of one tensor, so that it maps the
// tangent too.
template <class Function>
at::Tensor linear_in(const at::Tensor& t, const Function& linear) {
  if (!has_tangent(t)) return linear(t);
  const at::Tensor value = linear(primal_of(t));
  return with_tangent(value, linear(tangent_of(t)));
}

// Throws std::invalid_argument where a pending reduction of `spec` is not linear in its terms, such as a maximum: a
// tangent cannot be pending so. `who` is for the message.
void refuse_nonlinear(const char* who, const Spec& spec);

// Gives a DTensor that an operator writes in place, from a tensor with a tangent, one of zeros if it has none.
// LibTorch's formulas would use plain zeros in its place.
void start_tangent(const at::Tensor& written);

}  // namespace tessera::detail

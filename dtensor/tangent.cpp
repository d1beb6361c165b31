#include "tessera/dtensor/tangent.h"

#include <stdexcept>

#include <ATen/ops/_fw_primal.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "tessera/placement/reduction.h"

namespace tessera::detail {

bool in_forward_mode() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

at::Tensor primal_of(const at::Tensor& t) { return has_tangent(t) ? t._fw_primal(/*level=*/0) : t; }

at::Tensor tangent_of(const at::Tensor& t) { return t._fw_grad(/*level=*/0); }

at::Tensor with_tangent(const at::Tensor& primal, const at::Tensor& tangent) {
  return at::_make_dual(primal, tangent, /*level=*/0);
}

at::Tensor with_some_tangent(const at::Tensor& t) {
  if (!t.defined() || has_tangent(t) || !torch::autograd::isDifferentiableType(t.scalar_type())) return t;
  return with_tangent(t, at::zeros_like(t));
}

void refuse_nonlinear(const char* who, const Spec& spec) {
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement& p = spec.placements[i];
    if (!p.is_partial() || p.reduction().slope(spec.mesh.size(static_cast<int64_t>(i)))) continue;
    throw std::invalid_argument(
        fmt::format("{}: {} has a forward-mode derivative, which does not go through {}; give a tensor that is not "
                    "pending, or whose "
                    "pending reduction is a sum or an average, or call it outside of forward mode",
                    who, tessera::to_string(spec), tessera::to_string(p)));
  }
}

void start_tangent(const at::Tensor& written) {
  if (has_tangent(written) || !torch::autograd::isDifferentiableType(written.scalar_type())) return;
  written._set_fw_grad(at::zeros_like(written), /*level=*/0, /*is_inplace_op=*/true);
}

}  // namespace tessera::detail

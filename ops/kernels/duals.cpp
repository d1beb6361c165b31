// _make_dual returns a DTensor with a tangent, _fw_primal the same one without it. Both are views of the whole tensor
// for backward, and no views for forward mode. LibTorch's own kernels do not say how the view is made again from its
// base; as_strided, which it then uses, describes one process's memory.

#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/tangent.h"

namespace tessera {
namespace {

struct WholeView final : torch::autograd::ViewFunc {
  at::Tensor operator()(const at::Tensor& base) const override { return at::alias(base); }
  std::unique_ptr<ViewFunc> clone_and_set(std::optional<std::vector<c10::SymInt>> /*symints*/,
                                          std::optional<std::vector<at::Tensor>> /*tensors*/) const override {
    return std::make_unique<WholeView>();
  }
};

at::Tensor whole_view(const at::Tensor& t) {
  at::Tensor view;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    view = at::alias(t);
  }
  const bool recorded = c10::GradMode::is_enabled();
  view = torch::autograd::as_view(
      t, view, /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/false, std::make_unique<WholeView>(),
      [](const at::Tensor& seen) { return at::alias(seen); },
      recorded ? torch::autograd::CreationMeta::DEFAULT : torch::autograd::CreationMeta::NO_GRAD_MODE);
  if (!recorded || !t.requires_grad()) return view;
  const auto node = std::make_shared<torch::autograd::Identity>();
  node->set_next_edges(torch::autograd::collect_next_edges(t));
  torch::autograd::set_history(view, node);
  return view;
}

at::Tensor make_dual(const at::Tensor& primal, const at::Tensor& tangent, int64_t level) {
  if (!is_dtensor(primal) || !is_dtensor(tangent) || primal.sizes() != tangent.sizes()) {
    const auto text = [](const at::Tensor& t) {
      return is_dtensor(t) ? to_string(t) : fmt::format("a plain tensor [{}]", fmt::join(t.sizes(), ", "));
    };
    throw std::invalid_argument(
        fmt::format("_make_dual: the tangent is {}, of {}; give a DTensor of the same sizes, by distribute_tensor or "
                    "from_local on the same mesh",
                    text(tangent), text(primal)));
  }
  if (mesh_of(primal) != mesh_of(tangent)) {
    throw std::invalid_argument(fmt::format("_make_dual: the tangent is {}, of {}; both lie on one mesh",
                                            to_string(tangent), to_string(primal)));
  }
  if (detail::has_tangent(primal)) {
    throw std::invalid_argument(
        fmt::format("_make_dual: {} has a tangent already; unpack it first, and add the tangents if both are meant",
                    to_string(primal)));
  }
  const at::Tensor dual = whole_view(primal);
  dual._set_fw_grad(tangent, static_cast<uint64_t>(level), /*is_inplace_op=*/false);
  return dual;
}

at::Tensor fw_primal(const at::Tensor& t, int64_t /*level*/) { return whole_view(t); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  m.impl("_make_dual", make_dual);
  m.impl("_fw_primal", fw_primal);
}

}  // namespace
}  // namespace tessera

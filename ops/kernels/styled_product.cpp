#include "tessera/ops/kernels/styled_product.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include "tessera/dtensor/backward_node.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute_result.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/ops/kernels/matmul.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Computes the gradients of a product, and redistributes those of its input.
struct StyledFormula {
  static constexpr const char* kName = "tessera::styled_product";
  StyledProduct how;
  Placements from;
  bool moves = false;

  // Returns the placements to which the input's gradient, which lies as `term`, is redistributed. If others have used
  // x, the gradient stays as it is and waits for theirs; see add_reduction_hook.
  Placements goal(const at::Tensor& term) const {
    Placements out = placements_of(term);
    if (how.uses == nullptr || *how.uses != 1) return out;
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (moves || out[i].is_partial()) out[i] = from[i];
    }
    return is_layout(out, mesh_of(term).mesh(), spec_of(term).sizes) ? out : placements_of(term);
  }
  using Redistribution = at::Tensor(const at::Tensor&, const Placements&, const RedistributeOptions&);
  at::Tensor move(const at::Tensor& t, const Placements& to, Redistribution* by) const {
    const World::Scope scope(mesh_of(t).world(), "matmul", &how.contract->path);
    return by(t, to, {.async = !c10::GradMode::is_enabled()});
  }

  // Computes the same gradients as DenseGradients in matmul.cpp. They are differentiable, too.
  variable_list operator()(const Node& node, const variable_list& saved, const variable_list& gradients) const {
    const at::Tensor &x = saved[0], &w = saved[1], &g = gradients[0];
    variable_list out(3);
    const bool wants_weight = node.task_should_compute_output(1);
    const at::Tensor brought = wants_weight ? move(x, how.desired, detail::redistribute_to_read) : at::Tensor();
    if (node.task_should_compute_output(0)) {
      const at::Tensor term = dense(g, w.t().conj());
      out[0] = move(term, goal(term), detail::redistribute_result);
    }
    if (wants_weight) out[1] = dense_wgrad(brought.conj(), g);
    if (node.task_should_compute_output(2)) out[2] = sum_rows(g);
    return out;
  }
};

bool is_recorded(const at::Tensor& x, const at::Tensor& w) {
  return c10::GradMode::is_enabled() && (x.requires_grad() || w.requires_grad());
}

}  // namespace

std::optional<at::Tensor> styled_product(const at::Tensor& x, const at::Tensor& w,
                                         const std::optional<at::Tensor>& bias, const StyledProduct& how) {
  if (detail::has_tangent(x) || detail::has_tangent(w) || detail::has_tangent(bias)) return std::nullopt;
  if (x.dim() < 2 || w.dim() != 2 || !is_dtensor(w) || !is_recorded(x, w)) return std::nullopt;
  const Spec& from = spec_of(x);
  if (from.partial || spec_of(w).partial) return std::nullopt;
  const Placements to = normalize(how.desired, from.mesh.mesh(), from.ndim(), "matmul");
  if (any_partial(to)) return std::nullopt;
  const bool moves = to != from.placements;
  if (moves ? !how.contract->gather_input_again : x.dim() < 3) return std::nullopt;
  return detail::record({x, w, bias.value_or(at::Tensor())}, {detail::kept_for(w, x), detail::kept_for(x, w)},
                        StyledFormula{.how = how, .from = from.placements, .moves = moves}, [&] {
                          const at::Tensor brought = detail::redistribute_to_read(x, how.desired);
                          const at::AutoDispatchBelowADInplaceOrView below;
                          return bias ? dense_bias(brought, w, *bias) : dense(brought, w);
                        });
}

}  // namespace tessera

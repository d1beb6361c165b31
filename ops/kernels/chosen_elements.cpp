// The derivatives of operators whose results are elements of a tensor: those that an index names, and those that are
// chosen by their values, such as the largest. The gradient of an element goes to where it was. LibTorch's formulas add
// it to zeros of the whole tensor, which know nothing of the tensor's layout: every rank would hold, and fill, all of
// them. These begin with zeros that are cut as the tensor is.

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "tessera/dtensor/backward_node.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Returns the number of bytes that `t` brings to every rank along a mesh dimension: none where it is the same on all,
// as a plain or absent tensor is.
int64_t bytes_gathered(const at::Tensor& t, const DeviceMesh& mesh, std::size_t mesh_dim) {
  if (!t.defined() || !is_dtensor(t)) return 0;
  const Spec& spec = spec_of(t);
  const bool is_whole = spec.mesh == mesh && spec.placements[mesh_dim].is_replicate();
  return is_whole ? 0 : spec.numel() * static_cast<int64_t>(c10::elementSize(spec.dtype));
}

// Returns the layout of the zeros to which `grad` is added at `indices`: that of the tensor `of`, for which every rank
// gets the gradient and the indices; but replicated where it takes less time to add pieces of them, and to move the
// result to the layout of `of`. The zeros are then cut without communication.
Placements layout_of_zeros(const Spec& of, const at::Tensor& grad, const variable_list& indices) {
  const Mesh& mesh = of.mesh.mesh();
  const int64_t bytes = of.numel() * static_cast<int64_t>(c10::elementSize(of.dtype));
  Placements out = without_partial(of.placements);
  for (std::size_t i = 0; i < out.size(); ++i) {
    int64_t gathered = bytes_gathered(grad, of.mesh, i);
    for (const at::Tensor& t : indices) gathered += bytes_gathered(t, of.mesh, i);
    if (gathered * mesh.size(static_cast<int64_t>(i)) > bytes) out[i] = Replicate();
  }
  out = normalize(out, mesh, of.ndim(), "a gradient");
  // A partition may not cut the tensor without the others.
  return is_layout(out, mesh, of.sizes) ? out : Placements(out.size(), Replicate());
}

// Returns these zeros, in memory of one element.
at::Tensor zeros_for(const Spec& of, const at::Tensor& grad, const variable_list& indices) {
  const SpecPtr spec = intern_spec(of.mesh, layout_of_zeros(of, grad, indices), of.sizes, of.dtype);
  const at::Tensor zero = at::zeros({}, at::TensorOptions(of.dtype).device(of.mesh.device()));
  return detail::wrap(zero.expand(spec->local_sizes), spec);
}

// Says how an operator's indices name elements: one for each line along a dimension, one for all lines, or one for each
// dimension.
enum class IndexedBy { kLine, kDimension, kElement };

// Adds each gradient to zeros where its element was. The indices are saved.
struct ChosenElements {
  static constexpr const char* kName = "tessera::chosen_elements";
  IndexedBy by;
  SpecPtr self;
  int64_t dim = 0;
  bool drops_dim = false;  // the results lack the dimension

  variable_list operator()(const Node& node, const variable_list& saved, const variable_list& gradients) const {
    variable_list out(node.num_outputs());
    if (!node.task_should_compute_output(0)) return out;
    const auto with_dim = [&](const at::Tensor& t) { return drops_dim ? t.unsqueeze(dim) : t; };
    const at::Tensor grad = with_dim(gradients[0]);
    const at::Tensor zeros = zeros_for(*self, grad, saved);
    if (by == IndexedBy::kLine) {
      out[0] = at::scatter_add(zeros, dim, with_dim(saved[0]), grad);
    } else if (by == IndexedBy::kDimension && grad.size(dim) == 0) {
      // LibTorch's index_add refuses an empty index for tensors without memory, from which a call's result is told.
      out[0] = zeros + grad.sum(dim, /*keepdim=*/true);
    } else if (by == IndexedBy::kDimension) {
      out[0] = at::index_add(zeros, dim, saved[0], grad);
    } else {
      c10::List<std::optional<at::Tensor>> indices;
      for (const at::Tensor& t : saved) indices.push_back(t.defined() ? std::optional(t) : std::nullopt);
      out[0] = at::index_put(zeros, indices, grad, /*accumulate=*/true);
    }
    return out;
  }
};

at::IValue& arg(const c10::OperatorHandle& op, Stack& stack, const char* name) {
  return torch::jit::peek(stack, static_cast<std::size_t>(argument(op, name)), op.schema().arguments().size());
}

bool is_set(const c10::OperatorHandle& op, Stack& stack, const char* name) {
  return argument(op, name) >= 0 && arg(op, stack, name).toBool();
}

// Says whether the formula is recorded. In forward mode LibTorch's own serve.
bool is_recorded(const at::Tensor& self) {
  return self.requires_grad() && c10::GradMode::is_enabled() && is_dtensor(self) && self.dim() > 0 &&
         !detail::has_tangent(self);
}

void by_libtorch(const c10::OperatorHandle& op, Stack& stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, stack);
}

ChosenElements formula_of(const c10::OperatorHandle& op, Stack& stack, IndexedBy by) {
  const at::Tensor& self = arg(op, stack, "self").toTensor();
  ChosenElements formula{.by = by, .self = detail::meta(self).spec};
  if (by == IndexedBy::kElement) return formula;
  const int64_t dim = arg(op, stack, "dim").toInt();
  formula.dim = dim < 0 ? dim + self.dim() : dim;
  formula.drops_dim = argument(op, "keepdim") >= 0 && !is_set(op, stack, "keepdim");
  return formula;
}

// Runs the operator below autograd. Returns its results.
std::vector<at::Tensor> results_of(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
  std::vector<at::Tensor> out;
  for (const at::IValue& each : torch::jit::last(stack, op.schema().returns().size())) out.push_back(each.toTensor());
  return out;
}

// Handles an operator that is given indices.
template <IndexedBy by>
void read(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const at::Tensor self = arg(op, *stack, "self").toTensor();
  variable_list indices;
  const auto add = [&](const at::Tensor& t, std::size_t) { indices.push_back(t); };
  detail::each_tensor(arg(op, *stack, by == IndexedBy::kElement ? "indices" : "index"), add);
  const bool chosen_by_mask = std::ranges::any_of(indices, [](const at::Tensor& t) {
    return t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
  });
  if (!is_recorded(self) || chosen_by_mask || is_set(op, *stack, "sparse_grad")) return by_libtorch(op, *stack);
  detail::record({self}, indices, formula_of(op, *stack, by), [&] { return results_of(op, *stack); });
}

// Handles an operator that chooses elements, and returns their indices beside them.
void choose(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const at::Tensor self = arg(op, *stack, "self").toTensor();
  if (!is_recorded(self)) return by_libtorch(op, *stack);
  variable_list indices(1);
  detail::record({self}, indices, formula_of(op, *stack, IndexedBy::kLine), [&] {
    std::vector<at::Tensor> results = results_of(op, *stack);
    indices[0] = results[1];
    return results;
  });
}

constexpr std::array kChoosing = {"max.dim", "min.dim", "median.dim",  "nanmedian.dim", "mode",  "kthvalue",
                                  "topk",    "sort",    "sort.stable", "cummax",        "cummin"};

template <IndexedBy by>
torch::CppFunction reading() {
  return torch::CppFunction::makeFromBoxedFunction<&read<by>>();
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  m.impl("gather", reading<IndexedBy::kLine>());
  m.impl("index_select", reading<IndexedBy::kDimension>());
  m.impl("index.Tensor", reading<IndexedBy::kElement>());
  for (const char* name : kChoosing) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&choose>());
}

}  // namespace
}  // namespace tessera

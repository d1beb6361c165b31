#include "tessera/dtensor/mappings.h"

#include <stdexcept>
#include <utility>
#include <vector>

#include <c10/core/WrapDimMinimal.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

// Names the placement that a plain tensor of each rank has, the placement of the result, and that of the result's
// gradient.
struct Mapping {
  Placement from;
  Placement to;
  Placement gradient;
};

void check(const at::Tensor& x, const DeviceMesh& mesh, const char* who) {
  if (!x.defined()) throw std::invalid_argument(fmt::format("{}: the tensor is undefined; give a tensor", who));
  if (is_dtensor(x)) {
    throw std::invalid_argument(
        fmt::format("{}: the tensor is a DTensor already, {}; call redistribute, with grad_placements for the "
                    "gradient's layout",
                    who, to_string(x)));
  }
  check_one_dimension(mesh, who);
}

int64_t checked_dim(const at::Tensor& x, int64_t tensor_dim, const char* who) {
  if (tensor_dim < -x.dim() || tensor_dim >= x.dim()) {
    throw std::invalid_argument(fmt::format("{}: dimension {} of a tensor [{}]; it has dimensions {} to {}", who,
                                            tensor_dim, fmt::join(x.sizes(), ", "), -x.dim(), x.dim() - 1));
  }
  return c10::maybe_wrap_dim(tensor_dim, x.dim());
}

void check_even(const at::Tensor& x, const DeviceMesh& mesh, int64_t tensor_dim, bool allow_uneven, const char* who) {
  if (allow_uneven || x.size(tensor_dim) % mesh.size() == 0) return;
  throw std::invalid_argument(
      fmt::format("{}: dimension {} of [{}] is not divisible by the {} ranks of {}; pad it, or set allow_uneven, and "
                  "pass the size to the functions that gather",
                  who, tensor_dim, fmt::join(x.sizes(), ", "), mesh.size(), mesh.to_string()));
}

// Makes autograd see `result`, which shares the memory of `x`, as a view of `x`: it then refuses writes in place that
// would change what gradients are computed from. The gradient is passed on to `result`.
struct AsView : torch::autograd::Function<AsView> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const at::Tensor& x, const at::Tensor& result) {
    return x.as_strided(result.sizes(), result.strides(), result.storage_offset());
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*ctx*/,
                                               const torch::autograd::tensor_list& grads) {
    return {at::Tensor(), grads[0]};
  }
};

at::Tensor as_view_of(const at::Tensor& x, const at::Tensor& result) {
  if (!detail::has_tangent(result)) return AsView::apply(x, result);
  return detail::with_tangent(AsView::apply(detail::primal_of(x), detail::primal_of(result)),
                              detail::tangent_of(result));
}

at::Tensor run(const at::Tensor& x, const DeviceMesh& mesh, const Mapping& mapping, const char* who,
               std::optional<std::vector<int64_t>> shape = std::nullopt) {
  if (mapping.from.is_partial()) mapping.from.reduction().check(x.scalar_type(), who);
  if (mesh.size() == 1) {
    const at::Tensor only = x.contiguous();
    const bool copies = mapping.from.is_replicate() && mapping.to.is_replicate();
    return copies && only.is_same(x) ? as_view_of(x, only) : only;
  }
  const at::Tensor whole = from_local(x, mesh, {mapping.from}, {.shape = std::move(shape)});
  const at::Tensor result = to_local(redistribute(whole, {mapping.to}), Placements{mapping.gradient});
  return result.is_alias_of(x) ? as_view_of(x, result) : result;
}

at::Tensor cut(const at::Tensor& x, const DeviceMesh& mesh, Placement from, int64_t given_dim, bool allow_uneven,
               const char* who) {
  check(x, mesh, who);
  const int64_t tensor_dim = checked_dim(x, given_dim, who);
  check_even(x, mesh, tensor_dim, allow_uneven, who);
  return run(x, mesh, {.from = std::move(from), .to = Shard(tensor_dim), .gradient = Shard(tensor_dim)}, who);
}

at::Tensor gather(const at::Tensor& x, const DeviceMesh& mesh, const GatherOptions& options, const char* who) {
  check(x, mesh, who);
  const int64_t tensor_dim = checked_dim(x, options.tensor_dim, who);
  std::optional<std::vector<int64_t>> shape;
  if (options.size) {
    // With several ranks, from_local compares the size.
    if (mesh.size() == 1 && *options.size != x.size(tensor_dim)) {
      throw std::invalid_argument(
          fmt::format("{}: size {} along dimension {}, but the only rank has [{}]; give the size of the whole", who,
                      *options.size, tensor_dim, fmt::join(x.sizes(), ", ")));
    }
    shape = x.sizes().vec();
    (*shape)[static_cast<std::size_t>(tensor_dim)] = *options.size;
  }
  return run(
      x, mesh,
      {.from = Shard(tensor_dim), .to = Replicate(), .gradient = options.pending_gradient ? Partial() : Replicate()},
      who, std::move(shape));
}

}  // namespace

at::Tensor copy_to_region(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op) {
  check(x, mesh, "copy_to_region");
  // This is checked here, so that backward does not throw.
  if (torch::autograd::isDifferentiableType(x.scalar_type()))
    check_reduces(op, x.scalar_type(), "copy_to_region: gradient");
  return run(x, mesh, {.from = Replicate(), .to = Replicate(), .gradient = Partial(op)}, "copy_to_region");
}

at::Tensor reduce_from_region(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op) {
  check(x, mesh, "reduce_from_region");
  return run(x, mesh, {.from = Partial(op), .to = Replicate(), .gradient = Replicate()}, "reduce_from_region");
}

at::Tensor scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, int64_t tensor_dim, bool allow_uneven) {
  return cut(x, mesh, Replicate(), tensor_dim, allow_uneven, "scatter_to_region");
}

at::Tensor reduce_scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, int64_t tensor_dim,
                                    bool allow_uneven) {
  return cut(x, mesh, Partial(), tensor_dim, allow_uneven, "reduce_scatter_to_region");
}

at::Tensor gather_from_region(const at::Tensor& x, const DeviceMesh& mesh, const GatherOptions& options) {
  return gather(x, mesh, options, "gather_from_region");
}

at::Tensor scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, bool allow_uneven) {
  return cut(x, mesh, Replicate(), 0, allow_uneven, "scatter_to_sequence_region");
}

at::Tensor reduce_scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, bool allow_uneven) {
  return cut(x, mesh, Partial(), 0, allow_uneven, "reduce_scatter_to_sequence_region");
}

at::Tensor gather_from_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, bool tensor_parallel_output_grad,
                                       const std::optional<int64_t>& size) {
  return gather(x, mesh, {.tensor_dim = 0, .pending_gradient = tensor_parallel_output_grad, .size = size},
                "gather_from_sequence_region");
}

}  // namespace tessera

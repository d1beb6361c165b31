// This file has the operators that are right on pieces only when they are written in other operators. Each leaves calls
// on plain and replicated tensors to the rules.

#include <cmath>
#include <optional>
#include <stdexcept>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/any.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg__powsum.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/mesh/values_on_host.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// item() communicates explicitly: one all_reduce or all_gather on each mesh dimension along which ranks hold different
// pieces or terms.
bool item(const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = take_args(op, stack)[0].toTensor();
  const detail::Meta& meta = detail::meta(self);
  if (!meta.spec->mesh.is_member()) return false;
  const World::Scope scope(meta.spec->mesh.world(), "item");
  const Placements all(meta.spec->placements.size(), Replicate());
  give(op, stack, at::_local_scalar_dense(redistribute_local(meta.local(), *meta.spec, all)));
  return true;
}

// equal(a, b) returns a bool on every rank, so like item() it communicates explicitly: one all_reduce of a flag on each
// mesh dimension that cuts the tensors. Redistributing b to a's layout, and reducing pending terms, is implicit
// communication. An integer tensor is equal to itself without a comparison. Another one is not if it has a NaN, which
// only the rank that holds it sees; but on a GPU LibTorch does not look.
bool equal(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  if (!any_spread(args) || !is_dtensor(args[0].toTensor()) || !is_dtensor(args[1].toTensor())) return false;
  const detail::Meta& a = detail::meta(args[0].toTensor());
  const detail::Meta& b = detail::meta(args[1].toTensor());
  const DeviceMesh& mesh = a.spec->mesh;
  if (!(mesh == b.spec->mesh) || !mesh.is_member()) return false;
  const bool unseen = c10::isIntegralType(a.spec->dtype, /*includeBool=*/true) || !a.local().is_cpu();
  const bool itself = &a == &b && unseen;
  if (itself || a.spec->sizes != b.spec->sizes) {
    give(op, stack, itself);
    return true;
  }
  const Placements layout = without_partial(a.spec->placements);
  if (route_between(*a.spec, layout)->communicates() || route_between(*b.spec, layout)->communicates()) {
    detail::implicit_communication("aten::equal", [&] {
      return fmt::format("; whether pieces of {} and {} are equal", to_string(*a.spec), to_string(*b.spec));
    });
  }
  const World::Scope scope(mesh.world(), "aten::equal");
  const bool here =
      at::equal(redistribute_local(a.local(), *a.spec, layout), redistribute_local(b.local(), *b.spec, layout));
  at::Tensor same = at::full({1}, here ? 1 : 0, at::TensorOptions(at::kInt).device(mesh.device()));
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    if (layout[static_cast<std::size_t>(i)].is_shard()) same = all_reduce(same, mesh, i, ReduceOp::kMin);
  }
  give(op, stack, values_on_host(same, mesh.world()).item<int>() != 0);
  return true;
}

// LibTorch asks by this operator whether a tangent has the memory layout of its primal; it compares sizes, strides and
// storage_offset() itself. A plain tangent of a DTensor, which holds zeros, has not: LibTorch then makes one by the
// next operator.
bool has_same_storage_numel(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  const at::Tensor self = args[0].toTensor();
  const at::Tensor other = args[1].toTensor();
  give(op, stack, is_dtensor(self) == is_dtensor(other) && self.numel() == other.numel());
  return true;
}

// Returns zeros of the first tensor's dtype in the layout of the other: a tangent for it. The overload that writes out=
// runs like other operators.
bool zeros_in_layout_of(const c10::OperatorHandle& op, Stack& stack) {
  if (writes(op)) return false;
  const Stack args = take_args(op, stack);
  const at::Tensor other = args[1].toTensor();
  if (!is_dtensor(other) || args[2].toInt() != 0) return false;
  const at::Tensor out = at::zeros_like(other, args[0].toTensor().scalar_type());
  out.unsafeGetTensorImpl()->set_storage_offset(other.storage_offset());
  give(op, stack, out);
  return true;
}

// t_, transpose_, squeeze_ and unsqueeze_ make the tensor the view of itself that the operator without the underscore
// returns.
bool reshape_in_place(const c10::OperatorHandle& op, Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  Stack args = take_args(op, stack);
  const at::Tensor self = args[0].toTensor();
  const std::string viewing = schema.name().substr(0, schema.name().size() - 1);
  const char* const overload = viewing == "aten::transpose" ? "int" : schema.overload_name().c_str();
  const c10::OperatorHandle view_op = c10::Dispatcher::singleton().findSchemaOrThrow(viewing.c_str(), overload);
  if (dispatch::moves_inputs(view_op, args)) {
    throw std::invalid_argument(
        fmt::format("{}: of {} pieces would have to move; use the operator without the trailing underscore",
                    schema.name(), to_string(*detail::meta(self).spec)));
  }
  view_op.callBoxed(args);
  detail::convert_in_place(self, args[0].toTensor());
  detail::expect_new_shape(self);
  give(op, stack, self);
  return true;
}

// A new tensor of no elements gets the shape of a DTensor: it becomes a DTensor of the same layout, with values that
// are not yet written.
bool resize_as(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  const at::Tensor self = args[0].toTensor();
  const at::Tensor like = args[1].toTensor();
  if (!op.schema().name().ends_with('_') || is_dtensor(self) || !is_dtensor(like) || self.numel() != 0) return false;
  const detail::Meta& meta = detail::meta(like);
  const SpecPtr spec =
      intern_spec(meta.spec->mesh, without_partial(meta.spec->placements), like.sizes(), self.scalar_type());
  detail::convert_in_place(self, at::empty(spec->local_sizes, meta.local().options().dtype(self.scalar_type())), spec);
  give(op, stack, self);
  return true;
}

// Computes ||x||_p over `dims` (all if empty) from sums and extrema, which pieces can compute.
at::Tensor norm_of(const at::Tensor& x, double p, const std::vector<int64_t>& dims, bool keepdim) {
  const at::Tensor magnitude = x.abs();
  if (std::isinf(p)) return p > 0 ? at::amax(magnitude, dims, keepdim) : at::amin(magnitude, dims, keepdim);
  const auto sum = [&](const at::Tensor& t) { return at::sum(t, dims, keepdim); };
  if (p == 0) return sum(at::ne(x, 0).to(magnitude.scalar_type()));
  if (p == 1) return sum(magnitude);
  if (p == 2) return at::sqrt(sum(magnitude * magnitude));
  return at::pow(sum(at::pow(magnitude, p)), 1 / p);
}

// Before any communication, throws what LibTorch throws for the norm of integers, in a dtype that cannot hold the
// values, or of no elements where such a norm has no value.
void check_norm(const at::Tensor& x, const at::Scalar& p, const std::vector<int64_t>& dims,
                const std::optional<at::ScalarType>& dtype) {
  const at::ScalarType type = x.scalar_type();
  if (at::isFloatingType(type) && dtype.value_or(type) == type && x.numel() > 0) return;
  at::linalg_vector_norm(at::empty(x.sizes(), at::TensorOptions(type).device(at::kMeta)), p, dims, false, dtype);
}

// Says whether ranks would have to join their pieces of `x` for a reduction over `dims`, or all if empty.
bool joins_pieces(const at::Tensor& x, const std::vector<int64_t>& dims) {
  const auto is_reduced = [&](int64_t cut) {
    return dims.empty() ||
           std::ranges::any_of(dims, [&](int64_t dim) { return (dim < 0 ? dim + x.dim() : dim) == cut; });
  };
  return std::ranges::any_of(placements_of(x), [&](const Placement& p) {
    return p.is_partial() || (p.is_shard() && is_reduced(p.tensor_dim()));
  });
}

// Handles norm.* and linalg_vector_norm where pieces give terms of the result.
bool norm(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  if (!spread(args[0]) || writes(op)) return false;
  at::Tensor x = args[0].toTensor();
  const int p_at = argument(op, "p") >= 0 ? argument(op, "p") : argument(op, "ord");
  const int dim_at = argument(op, "dim");
  const int keep_at = argument(op, "keepdim");
  const int dtype_at = argument(op, "dtype");
  const at::IValue& given_p = args[static_cast<std::size_t>(p_at)];
  const at::Scalar p = given_p.isNone() ? at::Scalar(2.0) : given_p.toScalar();
  std::vector<int64_t> dims;
  if (dim_at >= 0 && args[static_cast<std::size_t>(dim_at)].isIntList()) {
    dims = args[static_cast<std::size_t>(dim_at)].toIntVector();
  }
  const auto dtype =
      dtype_at >= 0 ? args[static_cast<std::size_t>(dtype_at)].toOptional<at::ScalarType>() : std::nullopt;
  check_norm(x, p, dims, dtype);
  if (!joins_pieces(x, dims)) return false;
  if (dtype) x = x.to(*dtype);
  const bool keepdim = keep_at >= 0 && args[static_cast<std::size_t>(keep_at)].toBool();
  // Squares and sums of half types overflow where their norms do not.
  const at::ScalarType type = x.scalar_type();
  const bool half = has_16_bits(type);
  const at::Tensor result = norm_of(half ? x.to(at::kFloat) : x, p.toDouble(), dims, keepdim);
  give(op, stack, half ? result.to(type) : result);
  return true;
}

// _foreach_norm, _foreach_max and _foreach_powsum reduce each tensor by itself.
bool foreach_reduction(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  if (writes(op) || !any_spread(args)) return false;
  const std::string& name = op.schema().name();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // which leaves lists alone
  c10::List<at::Tensor> out;
  for (const at::Tensor& t : args[0].toTensorVector()) {
    if (name == "aten::_foreach_max") {
      out.push_back(at::amax(t));
      continue;
    }
    const at::Scalar p = args[1].toScalar();
    const auto dtype = args[2].toOptional<at::ScalarType>();
    out.push_back(name == "aten::_foreach_norm" ? at::linalg_vector_norm(t, p, std::nullopt, false, dtype)
                                                : at::linalg__powsum(t, p, std::nullopt, false, dtype));
  }
  give(op, stack, out);
  return true;
}

// _amp_foreach_non_finite_check_and_unscale_(self, found_inf, inv_scale) scales gradients back. found_inf becomes 1 on
// every rank if any rank's piece has a number that is not finite. It runs one all_reduce of a flag on each mesh
// dimension that cuts a tensor.
bool unscale(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  const bool in_place = op.schema().name().ends_with('_');  // the form with out= returns nothing either
  const std::vector<at::Tensor> gradients = args[0].toTensorVector();
  if (!in_place || gradients.empty()) return false;
  std::vector<at::Tensor> flags;
  for (const at::Tensor& t : gradients) flags.push_back(at::any(at::logical_not(at::isfinite(t))));
  const at::Tensor any = at::any(at::stack(flags));
  const at::Tensor found = is_dtensor(any) ? full_tensor(any) : any;
  const at::Tensor found_inf = args[1].toTensor();
  found_inf.copy_(at::maximum(found_inf, found.to(found_inf.scalar_type())));
  at::_foreach_mul_(gradients, args[2].toTensor().reshape({}));
  give(op, stack, Stack{});
  return true;
}

// median(x) and nanmedian(x) of a pending sum have their derivative where x equals the result. Backward would reduce x
// again, perhaps in another order, and find no such element.
bool whole_median(const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = take_args(op, stack)[0].toTensor();
  if (op.schema().returns().size() != 1 || !self.requires_grad() || !c10::GradMode::is_enabled()) return false;
  if (!detail::meta(self).spec->partial) return false;
  throw std::invalid_argument(
      fmt::format("{}: of {}, it has no exact derivative: the sum would be reduced again in backward; redistribute it "
                  "to Replicate or Shard first",
                  op.schema().name(), to_string(*detail::meta(self).spec)));
}

// Returns the reduction that the call asks for where ranks hold pieces, and sets the operator's own reduction to none.
std::optional<int64_t> taken_reduction(const c10::OperatorHandle& op, Stack& args) {
  const int at = argument(op, "reduction");
  if (at < 0 || !any_spread(args) || writes(op)) return std::nullopt;
  at::IValue& reduction = args[static_cast<std::size_t>(at)];
  const int64_t kind = reduction.toInt();
  if (kind == 0) return std::nullopt;
  reduction = int64_t{0};
  return kind;
}

// Losses with a reduction compute the loss of each element, and then its global mean or sum.
bool reduced_loss(const c10::OperatorHandle& op, Stack& stack) {
  Stack args = take_args(op, stack);
  const std::optional<int64_t> kind = taken_reduction(op, args);
  if (!kind) return false;
  op.callBoxed(args);
  const at::Tensor each = args[0].toTensor();
  args[0] = *kind == 1 ? at::mean(each) : at::sum(each);
  give(op, stack, std::move(args));
  return true;
}

// Returns one loss per element, or one per item where the operator combines an item's classes.
std::vector<int64_t> sizes_of_losses(const c10::OperatorHandle& op, at::IntArrayRef self) {
  const bool of_items = op.schema().name().find("margin_loss") != std::string::npos &&
                        op.schema().name().find("soft") == std::string::npos;
  return (of_items ? self.slice(0, self.size() - 1) : self).vec();
}

// Their backward computes each element's gradient; the incoming gradient is divided by the number of losses for a mean.
// In 16 bits that quotient could be 0, so float32 computes both.
bool reduced_loss_backward(const c10::OperatorHandle& op, Stack& stack) {
  Stack args = take_args(op, stack);
  const std::optional<int64_t> kind = taken_reduction(op, args);
  if (!kind) return false;
  const at::ScalarType dtype = args[1].toTensor().scalar_type();
  for (at::IValue& arg : args) {
    if (*kind == 1 && arg.isTensor() && arg.toTensor().defined() && has_16_bits(arg.toTensor().scalar_type())) {
      arg = arg.toTensor().to(at::kFloat);
    }
  }
  const std::vector<int64_t> losses = sizes_of_losses(op, args[1].toTensor().sizes());
  const at::Tensor grad = args[0].toTensor().expand(losses);
  args[0] = *kind == 1 ? grad / static_cast<double>(c10::multiply_integers(losses)) : grad;
  op.callBoxed(args);
  give(op, stack, args[0].toTensor().to(dtype));
  return true;
}

// LibTorch factorizes the transpose of a matrix that is contiguous in memory, and its formula for the gradient asks the
// whole tensor whether it was. So the pieces get the whole's answer.
bool factorize_as_whole(const c10::OperatorHandle& op, Stack& stack) {
  at::IValue& argument = stack[stack.size() - op.schema().arguments().size()];
  const at::Tensor x = argument.toTensor();
  if (!detail::is_dtensor(x) || x.size(-1) < 2) return false;
  if (!x.is_contiguous()) {
    argument = x.mT().clone(at::MemoryFormat::Contiguous).mT();
  } else if (!detail::meta(x).local().is_contiguous()) {
    argument = x.clone(at::MemoryFormat::Contiguous);
  }
  return false;  // the operator goes on with it
}

// Throws where a class is outside [0, num_classes). Where values are queued, the device checks its piece.
void check_classes(const at::Tensor& self, int64_t num_classes, std::optional<int64_t> known_highest) {
  if (is_queued(self)) {
    const at::Tensor inside = self.ge(0).logical_and_(self.lt(num_classes));
    return check_on_device(to_local(inside), "one_hot: a class is outside [0, num_classes)");
  }
  const auto lowest = self.min().item<int64_t>();
  const int64_t highest = known_highest ? *known_highest : self.max().item<int64_t>();
  if (lowest >= 0 && highest < num_classes) return;
  throw std::invalid_argument(
      fmt::format("one_hot: class {} is outside [0, {})", lowest < 0 ? lowest : highest, num_classes));
}

// LibTorch's one_hot scatters ones into plain zeros. This one reads the classes as item() does, where it must.
at::Tensor one_hot(const at::Tensor& self, int64_t num_classes) {
  if (self.scalar_type() != at::kLong) {
    throw std::invalid_argument(
        fmt::format("one_hot: classes are Long, not {}; convert them", c10::toString(self.scalar_type())));
  }
  if (self.numel() == 0 && num_classes <= 0) {
    throw std::invalid_argument(
        "one_hot: a tensor without elements does not tell the number of classes; give num_classes");
  }
  std::optional<int64_t> highest;
  if (num_classes == -1) {
    highest = self.max().item<int64_t>();
    num_classes = *highest + 1;
  }
  // Where values are queued, no class would pass the device's check.
  if (num_classes < 1) {
    throw std::invalid_argument(
        highest ? fmt::format("one_hot: the greatest class is {}; classes count from 0", *highest)
                : fmt::format("one_hot: num_classes is {}; give 1 or more, or -1 for one more than the greatest class",
                              num_classes));
  }
  if (self.numel() > 0) check_classes(self, num_classes, highest);
  const ImplicitReplication guard;
  return at::eq(self.unsqueeze(-1), at::arange(num_classes, self.options())).to(at::kLong);
}

void register_composites(torch::Library& m) { m.impl("one_hot", one_hot); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { register_composites(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { register_composites(m); }

[[maybe_unused]] const bool kRegistered = [] {
  register_decomposition("_local_scalar_dense", item);
  register_decomposition("equal", equal);
  register_decomposition("_has_same_storage_numel", has_same_storage_numel);
  register_decomposition("_new_zeros_with_same_feature_meta", zeros_in_layout_of);
  for (const char* name : {"t_", "transpose_", "squeeze_", "unsqueeze_"})
    register_decomposition(name, reshape_in_place);
  register_decomposition("resize_as", resize_as);
  for (const char* name : {"_linalg_det", "_linalg_slogdet"}) register_decomposition(name, factorize_as_whole);
  for (const char* name : {"median", "nanmedian"}) register_decomposition(name, whole_median);
  for (const char* name : {"_foreach_norm", "_foreach_max", "_foreach_powsum"}) {
    register_decomposition(name, foreach_reduction);
  }
  register_decomposition("_amp_foreach_non_finite_check_and_unscale", unscale);
  for (const char* name : {"norm", "linalg_vector_norm"}) register_decomposition(name, norm);
  for (const char* name : {"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"}) {
    register_decomposition(name, reduced_loss);
    register_decomposition(std::string(name) + "_backward", reduced_loss_backward);
  }
  for (const char* name : {"multi_margin_loss", "multilabel_margin_loss_forward"})
    register_decomposition(name, reduced_loss);
  for (const char* name : {"multi_margin_loss_backward", "multilabel_margin_loss_backward"}) {
    register_decomposition(name, reduced_loss_backward);
  }
  return true;
}();

}  // namespace
}  // namespace tessera

// Implements from_local and to_local, which make DTensors of plain pieces and plain pieces of DTensors.
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/local_layouts.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/dtensor/verify_local.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/replicated_check.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/failing.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Returns an alias outside autograd, which has this version.
at::Tensor alias_of(const at::Tensor& t, const c10::VariableVersion& version) {
  return at::Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(version, false));
}

// Returns a DTensor over `piece`. It has the piece's version, so that autograd, which may save either of them, sees a
// later write to the other one.
at::Tensor wrap_local(const at::Tensor& piece, const SpecPtr& spec) {
  if (!spec->mesh.is_member()) return detail::wrap(at::empty({0}, piece.options()), spec);
  const c10::VariableVersion& version = piece.unsafeGetTensorImpl()->version_counter();
  at::Tensor out = detail::wrap(alias_of(piece, version), spec);
  if (!version.enabled() || out.is_inference()) return out;
  c10::TensorImpl& impl = *out.unsafeGetTensorImpl();
  detail::meta(out).share_version(version, impl.version_counter());
  impl.set_version_counter(version);
  return out;
}

// Returns d value / d piece where it is one number: 1 where no reduction is pending.
std::optional<double> slope_of(const Spec& spec) {
  double out = 1;
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    if (!spec.placements[i].is_partial()) continue;
    const auto slope = spec.placements[i].reduction().slope(spec.mesh.size(static_cast<int64_t>(i)));
    if (!slope) return std::nullopt;
    out *= *slope;
  }
  return out;
}

// Computes d value / d piece for a piece of a pending reduction, and multiplies the gradient by it.
class PieceDerivative {
 public:
  PieceDerivative(const Spec& spec, const at::Tensor& piece)
      : spec_(spec), mesh_(spec.mesh), piece_(piece), slope_(slope_of(spec)) {
    for (std::size_t i = 0; i < spec.placements.size(); ++i) {
      if (!spec.placements[i].is_partial()) continue;
      reduction_ = spec.placements[i].reduction_ptr();
      mesh_dims_.push_back(static_cast<int64_t>(i));
    }
  }

  // Relies on this: all pending reductions of a tensor are of one kind, or all have a slope.
  at::Tensor times(const at::Tensor& gradient) const {
    if (slope_) return *slope_ == 1 ? gradient : gradient.mul(*slope_);
    // The derivative's own graph would take the result of all_reduce for a constant.
    if (c10::GradMode::is_enabled()) {
      throw std::runtime_error(fmt::format(
          "from_local: create_graph through a piece of {} would lose terms of the second derivative, since the pending "
          "reduction in it has no graph; use a layout whose derivative is a number, such as Partial(sum), Shard or "
          "Replicate",
          to_string(spec_.placements)));
    }
    return gradient.mul(derivative());
  }

 private:
  // A user's code may throw on this rank alone, while the others wait for it in all_reduce.
  at::Tensor derivative() const {
    const DeviceMesh over = mesh_.merged(mesh_dims_);
    const auto reduce = [&](const at::Tensor& t, ReduceOp op) { return all_reduce(t, over, 0, op); };
    try {
      return reduction_->derivative(piece_, {.ranks = over.size(), .all_reduce = reduce});
    } catch (const Reduction::NotImplemented&) {
      throw;
    } catch (...) {
      rethrow_failing(mesh_.world(), "from_local");
    }
  }

  const Spec& spec_;
  const DeviceMesh mesh_;
  const at::Tensor piece_;
  ReductionPtr reduction_;
  std::vector<int64_t> mesh_dims_;
  const std::optional<double> slope_;
};

// Returns the piece with the elements outside the mask set to the reduction's neutral element.
at::Tensor masked_piece(const at::Tensor& local, const at::Tensor& mask, const Spec& spec) {
  if (!mask.defined()) return local;
  const auto masked = std::ranges::find_if(
      spec.placements, [](const Placement& p) { return p.is_partial() && p.reduction().unmasked() != nullptr; });
  return at::where(mask, local, at::full_like(local, masked->reduction().neutral(local.scalar_type())));
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  using Wanted = std::optional<Placements>;
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& local, const std::optional<at::Tensor>& given_mask,
                            const SpecPtr& spec, const Wanted& wanted) {
    const at::Tensor mask = given_mask.value_or(at::Tensor());
    detail::saved<SpecPtr>(ctx, "spec") = spec;
    detail::saved<Wanted>(ctx, "grad") = wanted;
    ctx->set_materialize_grads(false);  // no zeros for a DTensor that took no part in the loss
    const bool needs_piece = !slope_of(*spec);
    const bool saves = needs_piece || mask.defined();
    ctx->saved_data["saves"] = saves;
    // Outside the mesh the tensor may have any sizes, and there is nothing of it in the DTensor.
    if (!spec->mesh.is_member()) detail::saved<std::vector<int64_t>>(ctx, "sizes") = local.sizes().vec();
    // A node that has saved nothing may run again.
    if (saves) ctx->save_for_backward({needs_piece ? local : at::Tensor(), mask});
    return wrap_local(masked_piece(local, mask, *spec), spec);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    tensor_list out(4);
    if (!grads[0].defined()) return out;
    const Spec& spec = *detail::saved<SpecPtr>(ctx, "spec");
    const bool is_held = detail::is_shared(grads[0]);
    const at::Tensor g = detail::as_dtensor(grads[0], spec);
    if (spec.mesh.is_member()) {
      out[0] = gradient_of_piece(ctx, g);
    } else {
      const auto options = at::TensorOptions(spec.dtype).device(spec.mesh.device());
      out[0] = at::zeros(detail::saved<std::vector<int64_t>>(ctx, "sizes"), options);
    }
    // Autograd counts references to a tensor, not to its memory: of an alias nobody would know that others have it.
    const at::Tensor& whole = detail::meta(g).local();
    if (is_held && !out[0].is_same(whole) && out[0].is_alias_of(whole)) out[0] = out[0].clone();
    return out;
  }
  static at::Tensor gradient_of_piece(AutogradContext* ctx, const at::Tensor& g) {
    const Spec& spec = *detail::saved<SpecPtr>(ctx, "spec");
    const Wanted& wanted = detail::saved<Wanted>(ctx, "grad");
    const tensor_list saved = ctx->saved_data["saves"].toBool() ? ctx->get_saved_variables() : tensor_list(2);
    const at::Tensor& mask = saved[1];
    const Placements layout = wanted.value_or(without_partial(spec.placements));
    const bool is_there = !c10::GradMode::is_enabled() && placements_of(g) == layout && !detail::has_tangent(g);
    at::Tensor out = is_there ? detail::meta(g).local() : to_local(redistribute(g, layout), layout);
    if (!wanted) {
      const at::Tensor piece = saved[0].defined() ? masked_piece(saved[0].detach(), mask, spec) : at::Tensor();
      out = PieceDerivative(spec, piece).times(out);
    }
    return mask.defined() ? at::where(mask, out, at::zeros_like(out)) : out;
  }
};

// Returns this rank's piece as a tensor of its own, whose version counts the writes to the DTensor.
at::Tensor alias_of_piece(const at::Tensor& dtensor) {
  const detail::Meta& meta = detail::meta(dtensor);
  const detail::WriteCounters counters = meta.write_counters();
  return alias_of(meta.local(), detail::raises_version(dtensor) ? counters.version : counters.by_operators);
}

struct ToLocal : torch::autograd::Function<ToLocal> {
  using Wanted = std::optional<Placements>;
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& dtensor, const Wanted& wanted) {
    if (dtensor.requires_grad()) {
      detail::saved<SpecPtr>(ctx, "spec") = detail::meta(dtensor).spec;
      detail::saved<Wanted>(ctx, "grad") = wanted;
      ctx->set_materialize_grads(false);  // no zeros for a piece that took no part in the loss
    }
    return alias_of_piece(dtensor);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor()};
    const Spec& spec = *detail::saved<SpecPtr>(ctx, "spec");
    const Wanted& wanted = detail::saved<Wanted>(ctx, "grad");
    const at::Tensor piece = wanted ? grads[0] : of_value(grads[0], spec);
    const Placements layout = wanted.value_or(without_partial(spec.placements));
    const bool is_alone = !c10::GradMode::is_enabled() && !detail::has_tangent(piece);
    if (is_alone && spec.mesh.is_member() && !is_dtensor(piece) && piece.is_contiguous()) {
      const SpecPtr whole = intern_spec(spec.mesh, layout, spec.sizes, piece.scalar_type());
      // The tensor itself goes on, since autograd counts the references to it.
      if (piece.sizes() == at::IntArrayRef(whole->local_sizes)) return {detail::wrap(piece, whole), at::Tensor()};
    }
    return {from_local(piece, spec.mesh, layout, {.shape = spec.sizes}), at::Tensor()};
  }
  // Returns the value's gradient, of which the piece's is the product with d value / d piece.
  static at::Tensor of_value(const at::Tensor& of_piece, const Spec& spec) {
    const std::optional<double> slope = slope_of(spec);
    if (slope) return *slope == 1 ? of_piece : of_piece.div(*slope);
    throw std::runtime_error(fmt::format(
        "to_local: the gradient of a piece of {} does not give the gradient of the value; redistribute it to a layout "
        "without that pending reduction before to_local, or give grad_placements, the layout of the value's gradient",
        to_string(spec)));
  }
};

// Returns the text of what all ranks must pass alike. Without a shape option the shape follows from the pieces, which
// verify_local compares.
std::string text_of(const Spec& spec, const FromLocalOptions& options, bool recorded) {
  const std::string shape =
      options.shape ? fmt::format(" [{}] [{}]", fmt::join(spec.sizes, ", "), fmt::join(spec.strides, ", ")) : "";
  return to_string(spec.placements) + shape + (recorded ? " with a gradient" : "");
}

// Makes a DTensor of a piece that has a tangent: both become DTensors in the same way.
at::Tensor from_local_in_forward_mode(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                                      const FromLocalOptions& options) {
  const at::Tensor value = from_local(detail::primal_of(local), mesh, placements, options);
  detail::refuse_nonlinear("from_local", spec_of(value));
  return detail::with_tangent(value, from_local(detail::tangent_of(local), mesh, placements, options));
}

// Returns the piece of a DTensor that has a tangent, which may have another layout.
at::Tensor to_local_in_forward_mode(const at::Tensor& dtensor, const std::optional<Placements>& grad_placements) {
  const Spec& spec = spec_of(dtensor);
  detail::refuse_nonlinear("to_local", spec);
  const at::Tensor tangent = redistribute(detail::tangent_of(dtensor), spec.placements);
  const at::Tensor value = to_local(detail::primal_of(dtensor), grad_placements);
  return detail::with_tangent(value, to_local(tangent, grad_placements));
}

}  // namespace

at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                      const FromLocalOptions& options) {
  if (local.defined() && !is_dtensor(local) && detail::has_tangent(local)) {
    return from_local_in_forward_mode(local, mesh, placements, options);
  }
  const detail::NotDeferred own_tensors;
  detail::LocalLayouts layouts;
  const auto read = [&] { layouts = detail::checked_layouts(local, mesh, placements, options); };
  if (options.check) {
    const bool recorded = local.requires_grad() && at::GradMode::is_enabled();
    Agreement({mesh}, "from_local")
        .run(
            read, [&] { return text_of(*layouts.spec, options, recorded); },
            "the ranks were called with different arguments; every rank must pass the same placements, shape and "
            "strides, and a piece that requires a gradient where the others' do");
    verify_local(local, *layouts.spec);
  } else {
    read();
  }
  const SpecPtr& spec = layouts.spec;
  detail::check_piece(local, *spec);
  std::vector<int64_t> alike;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    if (spec->placements[static_cast<std::size_t>(dim)].is_replicate()) alike.push_back(dim);
  }
  check_replicated(local, mesh, alike, "from_local");
  // Under row-major global strides pieces are row-major, so that what can be viewed globally can be viewed here.
  // Gaps stay under strides that are given, but not another order of dimensions.
  const bool reordered = options.stride && mesh.is_member() && !is_in_order_of(*spec, local);
  const at::Tensor piece = !options.stride ? local.contiguous() : reordered ? as_dense(local, *spec) : local;
  const bool recorded = piece.requires_grad() && at::GradMode::is_enabled();
  if (!recorded) return wrap_local(masked_piece(piece, options.mask, *spec), spec);
  return FromLocal::apply(piece, options.mask.defined() ? std::optional(options.mask) : std::nullopt, spec,
                          layouts.gradient);
}

at::Tensor to_local(const at::Tensor& dtensor, const std::optional<Placements>& grad_placements) {
  const Spec& spec = spec_of(dtensor);
  if (detail::has_tangent(dtensor)) return to_local_in_forward_mode(dtensor, grad_placements);
  const detail::NotDeferred own_tensors;
  detail::check_current(dtensor, "to_local");
  detail::watch_gradient(dtensor);
  std::optional<Placements> gradient;
  if (grad_placements) {
    const char* const who = "to_local: grad_placements";
    gradient = normalize(*grad_placements, spec.mesh.mesh(), spec.ndim(), who);
    detail::check_gradient_layout(spec, *gradient, who);
  }
  // To make a node that nobody records costs more than the rest.
  if (!dtensor.requires_grad() || !at::GradMode::is_enabled()) {
    const at::NoGradGuard no_grad;
    return alias_of_piece(dtensor);
  }
  return ToLocal::apply(dtensor, gradient);
}

}  // namespace tessera

#include "tessera/dtensor/redistribution.h"

#include <stdexcept>

#include <fmt/format.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/core/wrapper.h"
#include "tessera/mesh/failing.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

void check_dtypes(const Spec& from, at::ScalarType to, const RedistributeOptions& options, bool requires_grad) {
  const at::ScalarType back = options.backward_dtype.value_or(from.dtype);
  if (requires_grad && !(isFloatingType(to) || isComplexType(to))) {
    throw std::invalid_argument(fmt::format(
        "redistribute: a tensor that requires grad as {}, which has no gradients; detach it", toString(to)));
  }
  if (requires_grad && !(isFloatingType(back) || isComplexType(back))) {
    throw std::invalid_argument(
        fmt::format("redistribute: a gradient as {}; backward_dtype must be floating", toString(back)));
  }
  if (requires_grad && isComplexType(from.dtype) && isComplexType(to) && !isComplexType(back)) {
    throw std::invalid_argument(
        fmt::format("redistribute: the gradient of {} as {}, which would lose its imaginary part; pass a complex "
                    "backward_dtype, or none",
                    toString(from.dtype), toString(back)));
  }
}

// Throws where the pieces of a pending reduction, which are converted before they are reduced, would give another
// value.
void check_conversion(const Spec& from, at::ScalarType to) {
  for (const Placement& p : from.placements) {
    if (!p.is_partial() || commutes_with_conversion(p.reduction(), from.dtype, to)) continue;
    throw std::invalid_argument(
        fmt::format("redistribute: {} as {} in forward_dtype {}, to which pieces are converted before they are "
                    "reduced: {} of converted pieces is another value; redistribute first, and convert the result",
                    toString(from.dtype), to_string(from.placements), toString(to), to_string(p)));
  }
}

// Returns the Spec of the result. A layout that some tensor has was checked before, and is not checked again: to check
// a user's partition takes as long as to make all of its parts.
SpecPtr spec_of_result(const Spec& from, const Placements& to, at::ScalarType dtype) {
  try {
    return intern_spec(from.mesh, to, from.sizes, dtype);
  } catch (const std::invalid_argument&) {
    check_layout(to, from.mesh.mesh(), from.sizes, "redistribute");  // throws the same in this function's name
    throw;
  }
}

}  // namespace

std::optional<Redistribution> redistribution_of(const at::Tensor& dtensor, const Placements& placements,
                                                const RedistributeOptions& options) {
  const SpecPtr from = spec_ptr_of(dtensor);
  const Mesh& mesh = from->mesh.mesh();
  Redistribution redistribution{.from = from, .to = nullptr, .gradient = {}};
  if (options.grad_placements) {
    const char* const who = "redistribute: grad_placements";
    redistribution.gradient = normalize(*options.grad_placements, mesh, from->ndim(), who);
    check_layout(*redistribution.gradient, mesh, from->sizes, who);
  }
  const Placements to = normalize(placements, mesh, from->ndim(), "redistribute");
  const at::ScalarType dtype = options.forward_dtype.value_or(from->dtype);
  detail::check_current(dtensor, "redistribute");
  const bool plain = !options.grad_placements && options.backward_dtype.value_or(dtype) == dtype;
  if (to == from->placements && dtype == from->dtype && plain) return std::nullopt;
  check_dtypes(*from, dtype, options, dtensor.requires_grad());
  check_partials(from->placements, dtype, "redistribute");
  if (dtype != from->dtype) check_conversion(*from, dtype);
  check_partials(to, dtype, "redistribute");
  redistribution.to = spec_of_result(*from, to, dtype);
  if (!options.cost_model.links.empty()) check_cost_model(options.cost_model, mesh.ndim(), "redistribute");
  return redistribution;
}

// Sends pieces in the result's dtype.
RoutePtr Redistribution::route(const CostModel& model) const {
  if (from->dtype == to->dtype) return route_between(*from, to->placements, model);
  return route_between(*intern_spec(from->mesh, from->placements, from->sizes, from->strides, to->dtype),
                       to->placements, model);
}

at::Tensor Redistribution::as_sent(const at::Tensor& piece) const {
  if (from->dtype == to->dtype) return piece;
  return failing(from->mesh.world(), "redistribute", [&] { return piece.to(to->dtype); });
}

Placements default_gradient(const Spec& input, const Placements& gradient) {
  if (!input.partial) return input.placements;
  Placements out = input.placements;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].is_partial()) out[i] = gradient[i].is_partial() ? Replicate() : gradient[i];
  }
  return is_layout(out, input.mesh.mesh(), input.sizes) ? out : without_partial(input.placements);
}

}  // namespace tessera

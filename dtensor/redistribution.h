#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"

namespace tessera {

// Describes one tensor's redistribution: from which layout to which.
struct Redistribution {
  SpecPtr from;
  SpecPtr to;                          // the piece and the global tensor are row-major
  std::optional<Placements> gradient;  // if the caller gave it

  // Returns how pieces are sent, in the result's dtype.
  RoutePtr route(const CostModel& model) const;
  // Converts a piece to the dtype in which it is sent.
  at::Tensor as_sent(const at::Tensor& piece) const;
};

// Returns what redistribute(dtensor, placements, options) is to do, or nullopt where nothing changes. Throws
// std::invalid_argument, on every rank alike, on what redistribute() refuses. Does not communicate.
std::optional<Redistribution> redistribution_of(const at::Tensor& dtensor, const Placements& placements,
                                                const RedistributeOptions& options);

// Returns the placements of an input's gradient when the caller gave none: the input's own; where the input is Partial,
// the gradient's own (Replicate for a Partial one). If that is no valid layout, every Partial of the input becomes
// Replicate.
Placements default_gradient(const Spec& input, const Placements& gradient);

}  // namespace tessera

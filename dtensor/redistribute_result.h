#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/dtensor.h"

namespace tessera::detail {

// Does what redistribute() does, for the result of an operator that the caller does not read again. If no other tensor,
// view or saved tensor shares the piece's memory, the piece may be reduced in place, and the result may keep its
// memory: `dtensor` then has no value any more.
at::Tensor redistribute_result(const at::Tensor& dtensor, const Placements& placements,
                               const RedistributeOptions& options = {});

// Does what redistribute() does, for a caller that does not write to the result: where nothing moves, as over a mesh
// dimension of one rank, the result shares the memory and the count of writes of `dtensor`, as a view does.
at::Tensor redistribute_to_read(const at::Tensor& dtensor, const Placements& placements,
                                const RedistributeOptions& options = {});

// Does what redistribute_to_read() does, for an activation that several parameters may be used with, as the projections
// of attention are. Where autograd records it, and still holds the result of an earlier call for the same tensor and
// placements, this call returns that result: the ranks communicate once for all uses, in backward too. So between
// two uses every rank keeps, frees and writes the same tensors. The caller does not write to the result.
at::Tensor redistribute_shared(const at::Tensor& dtensor, const Placements& placements);

}  // namespace tessera::detail

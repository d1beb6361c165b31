#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/dtensor.h"

namespace tessera::detail {

// Does what redistribute() does, for the result of an operator that the caller does not read again. If no other tensor,
// view or saved tensor shares the piece's memory, the piece may be reduced in place, and the result may keep its
// memory: `dtensor` then has no value any more.
at::Tensor redistribute_result(const at::Tensor& dtensor, const Placements& placements,
                               const RedistributeOptions& options = {});

}  // namespace tessera::detail

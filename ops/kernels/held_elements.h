#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/placement/intervals.h"

namespace tessera::detail {

// These turn the numbers of elements along a dimension into places in this rank's piece, which holds the elements
// `held`, and back. They take time in proportion to the tensor, however many intervals there are.

// Returns the place in the piece of each of `elements`, or `elsewhere` for those of other ranks.
at::Tensor places_of(const at::Tensor& elements, const Intervals& held, int64_t elsewhere);
// Returns the element at each of `places`, which must be in the piece.
at::Tensor elements_at(const at::Tensor& places, const Intervals& held);

}  // namespace tessera::detail

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"

// Tensors cut into the pieces that the ranks of a mesh would hold, and put together again, in one process.
namespace tessera::testing {

// One piece a rank, in row-major order of coordinates. The terms of a Partial differ in size and sign. Draws from the
// default generator.
std::vector<at::Tensor> distribute(const at::Tensor& whole, const Placements& placements,
                                   std::span<const int64_t> mesh_shape);

// The elements of `tile` in `whole`.
at::Tensor cut(at::Tensor whole, const Tile& tile);

// `piece` in a tensor of `sizes` that is zero elsewhere.
at::Tensor embedded(const at::Tensor& piece, const Tile& tile, at::IntArrayRef sizes);

// The inverse, of a tensor of `sizes`. Sets `consistent` to false when ranks that should hold the same value do not.
at::Tensor join(std::span<const at::Tensor> pieces, const Placements& placements, std::span<const int64_t> mesh_shape,
                at::IntArrayRef sizes, bool& consistent);

// What terms reduce to.
at::Tensor reduced(const std::vector<at::Tensor>& terms, ReduceOp op);

// Equal, or close where the type is not integral (NaN equals NaN).
bool same_values(const at::Tensor& a, const at::Tensor& b);

// Whether a tensor of this type may be pending by this reduction: no sums of bool, no averages of integers,
// nothing of 8 bits of floating point.
bool can_be_partial(at::ScalarType type, ReduceOp op);

std::vector<int64_t> coordinate_of(std::size_t rank, std::span<const int64_t> mesh_shape);
std::size_t num_ranks(std::span<const int64_t> mesh_shape);

// Of a plain reduction.
ReduceOp plain_op(const Placement& partial);

}  // namespace tessera::testing

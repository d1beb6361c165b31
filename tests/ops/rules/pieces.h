#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"

// Cuts tensors into the pieces that the ranks of a mesh would hold, and joins them again, in one process.
namespace tessera::testing {

// Returns one piece per rank, in row-major order of coordinates. The terms of a Partial differ in size and sign. It
// draws from the default generator. Those of a reduction of a user are the pieces that its spread() makes.
std::vector<at::Tensor> distribute(const at::Tensor& whole, const Placements& placements,
                                   std::span<const int64_t> mesh_shape);

// Returns the elements of `tile` in `whole`.
at::Tensor cut(at::Tensor whole, const Tile& tile);

// Returns a tensor of `sizes` that is `piece` in the tile and zero elsewhere.
at::Tensor embedded(const at::Tensor& piece, const Tile& tile, at::IntArrayRef sizes);

// Is the inverse of distribute, for a tensor of `sizes`. Sets `consistent` to false if ranks that should hold the same
// value do not.
at::Tensor join(std::span<const at::Tensor> pieces, const Placements& placements, std::span<const int64_t> mesh_shape,
                at::IntArrayRef sizes, bool& consistent);

// Returns the reduction of the terms.
at::Tensor reduced(const std::vector<at::Tensor>& terms, ReduceOp op);

// Says whether the tensors are equal, or close if the dtype is not integral. NaN equals NaN.
bool same_values(const at::Tensor& a, const at::Tensor& b);

// Says whether a tensor of this dtype may be pending by this reduction: bools have no sums, integers have no averages,
// and 8-bit floating dtypes have no reductions.
bool can_be_partial(at::ScalarType type, ReduceOp op);

std::vector<int64_t> coordinate_of(std::size_t rank, std::span<const int64_t> mesh_shape);
std::size_t num_ranks(std::span<const int64_t> mesh_shape);

// Returns the op of a plain reduction; nullopt for a reduction of a user.
std::optional<ReduceOp> plain_op(const Placement& partial);

}  // namespace tessera::testing

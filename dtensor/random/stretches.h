#pragma once

#include <cstdint>
#include <span>

#include <c10/util/FunctionRef.h>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/placement/layout.h"

namespace tessera::detail {

// Is called as run(first element in the global tensor, first element in the piece, count) for each stretch of elements
// that are adjacent in both.
using Run = c10::function_ref<void(int64_t global, int64_t local, int64_t count)>;

// Calls `run` for each stretch of a tile of a global tensor of `sizes`, in row-major order. Each element counts as
// `width` numbers.
void each_stretch(std::span<const int64_t> sizes, const Tile& tile, int64_t width, Run run);

// Sets `piece` to describe the same elements, as plain data, and returns true; returns false where it has no room for
// them. The tile must hold an element.
bool describe_piece(std::span<const int64_t> sizes, const Tile& tile, int64_t width, gpu::PieceTable& piece);

}  // namespace tessera::detail

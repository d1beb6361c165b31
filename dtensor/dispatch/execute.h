#pragma once

#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

// Runs `call` as `decision` says: redistributes, calls the operator on the pieces, wraps what comes. Leaves the results
// on the stack. An error that this rank alone may see is told to the world.
void execute(const Call& call, const Decision& decision);

// Whether the global tensor's elements lie in the order of their indexes, without gaps.
bool is_row_major(const Spec& spec);

// `local` dense, its dimensions in memory in the order of the global tensor's; row-major where that is an expanded one.
at::Tensor as_dense(const at::Tensor& local, const Spec& spec);

// A piece that was moved is row-major. Where the tensor is not, strides of results, and LibTorch's formulas that ask
// whether a matrix is transposed, would differ from what the piece is.
at::Tensor in_memory_order(const at::Tensor& local, const Spec& spec);

}  // namespace tessera::dispatch

#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera {

// These functions make the order of a piece's dimensions in memory that of the global tensor. Where the two differ, the
// strides of results, and LibTorch's formulas that ask whether a matrix is transposed, do not match the piece.

// Says whether the global tensor is row-major without gaps.
bool is_row_major(const Spec& spec);

// Says whether the piece's dimensions lie in memory in the order of the global tensor's; there may be gaps. An expanded
// global dimension (stride 0) may lie anywhere.
bool is_in_order_of(const Spec& spec, const at::Tensor& local);

// Returns `local` made dense, with its dimensions in the order in memory of the global tensor's; row-major if the
// global tensor is expanded.
at::Tensor as_dense(const at::Tensor& local, const Spec& spec);

// Gives a redistributed piece, which is row-major, the memory order of the global tensor.
at::Tensor in_memory_order(const at::Tensor& local, const Spec& spec);

}  // namespace tessera

#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>

namespace tessera {

// A contiguous tensor as at::empty makes it, in the memory of an earlier one of as many bytes that nobody holds any
// more, when there is one. Memory fresh from the system costs as much again as filling it: every page is a fault. For
// CPU tensors of 64 KiB to 64 MiB; at most 128 MiB are kept for the process. Others are at::empty's.
//
// The tensor is its holder's alone, and may be kept for ever. Safe from any thread.
at::Tensor reused_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor reused_copy(const at::Tensor& tensor);

// Bytes that are kept and nobody holds, for tests.
std::size_t reusable_bytes();

}  // namespace tessera

#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>

namespace tessera {

// Returns an uninitialized contiguous tensor like at::empty. CPU tensors of 64 KiB to 64 MiB reuse the memory of an
// earlier result of the same number of bytes that nobody holds any more, if there is one: with memory fresh from the
// system every page faults, which costs as much as filling the tensor. The process keeps at most 128 MiB. All other
// tensors come from at::empty.
//
// No other tensor shares the result's memory, and the caller may keep it for any time. Any thread may call it.
at::Tensor reused_empty(at::IntArrayRef sizes, const at::TensorOptions& options);
// Returns a contiguous copy of `tensor` in such memory.
at::Tensor reused_copy(const at::Tensor& tensor);

// Returns, for tests, how many bytes are kept that nobody holds.
std::size_t reusable_bytes();
// Says whether the list of memory to be reused holds this storage, and so counts as one of its owners.
bool is_listed(const c10::Storage& storage);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/placement/intervals.h"

// Looks up rows in a table of which this rank holds some. On a GPU with our kernels one of them does it; elsewhere
// LibTorch's operators do. Nothing waits for a GPU.
namespace tessera::detail {

// Says which rows of a table this rank holds, and how many the table has.
struct HeldRows {
  Intervals held;
  int64_t all;
};

// Checks that every one of `ids` is in `range`: "embedding: index 9 is outside the table's rows [0, 7)".
// On the CPU it throws std::out_of_range; on a GPU the check ends the process's use of the GPU
// (mesh/core/device_checks.h).
void check_indices(const at::Tensor& ids, const Interval& range, const char* op, const char* things);

// Returns [*, columns], for `ids` [*] (int64 or int32): the rows of the table that they name, of which `weight` has
// this rank's, or zeros where another rank has the row. An id outside the table fails as in check_indices.
at::Tensor masked_rows(const at::Tensor& weight, const at::Tensor& ids, const HeldRows& rows);
// Returns the gradient of `weight`. Rows named by `padding` (-1: none) get none. With `scale_by_freq` each row's is
// divided by the number of ids that name it.
at::Tensor masked_rows_gradient(const at::Tensor& grad, const at::Tensor& ids, const HeldRows& rows, int64_t padding,
                                bool scale_by_freq);

// Does the same as masked_rows for autograd, as often as it likes, but not in forward mode.
at::Tensor masked_embedding(const at::Tensor& weight, const at::Tensor& ids, const HeldRows& rows, int64_t padding,
                            bool scale_by_freq);

// Returns what the kernel is told, with tensors of any device, or nullopt where it cannot do it: where the rows held
// are several intervals, or their numbers are not adjacent in memory. `ids` and `out` must be row-major.
std::optional<gpu::MaskedRows> masked_rows_request(const at::Tensor& weight, const at::Tensor& ids,
                                                   const HeldRows& rows, const at::Tensor& out);

}  // namespace tessera::detail

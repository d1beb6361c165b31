#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "tessera/gpu_kernels/interface.h"

namespace tessera {

// Returns the kernels of our own for the device of `t`, or null where there are none: on other devices than CUDA's, and
// without libtessera_gpu.so. Callers then use LibTorch's operators.
const gpu::Kernels* kernels_for(const at::Tensor& t);

// Return the kernels' name of a dtype, or nullopt where they have none; the second one of floating-point dtypes alone.
std::optional<gpu::Number> number_of(at::ScalarType dtype);
std::optional<gpu::Number> floating_number_of(at::ScalarType dtype);

// Says whether the memory of rows, [*, columns], has the numbers of each one adjacent, as the kernels read them.
bool has_adjacent_columns(const at::Tensor& rows);

// Calls start(stream) with the current stream of the device of `t`, which is the current device meanwhile; `start`
// returns an error of CUDA, or 0. Throws std::runtime_error, which names the kernel, where it is not 0. Does not wait.
void start_kernel(const char* name, const at::Tensor& t, c10::function_ref<int(void* stream)> start);

}  // namespace tessera

#include "tessera/mesh/core/gpu_kernels.h"

#include <stdexcept>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "tessera/gpu_kernels/loader.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera {

const gpu::Kernels* kernels_for(const at::Tensor& t) { return t.is_cuda() ? gpu::kernels() : nullptr; }

bool has_adjacent_columns(const at::Tensor& rows) {
  return is_in_memory(rows) && (rows.stride(-1) == 1 || rows.size(-1) == 1);
}

std::optional<gpu::Number> number_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte: return gpu::Number::kByte;
    case at::kChar: return gpu::Number::kChar;
    case at::kShort: return gpu::Number::kShort;
    case at::kInt: return gpu::Number::kInt;
    case at::kLong: return gpu::Number::kLong;
    case at::kBool: return gpu::Number::kBool;
    default: return floating_number_of(dtype);
  }
}

std::optional<gpu::Number> floating_number_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return gpu::Number::kFloat;
    case at::kDouble: return gpu::Number::kDouble;
    case at::kHalf: return gpu::Number::kHalf;
    case at::kBFloat16: return gpu::Number::kBfloat16;
    default: return std::nullopt;
  }
}

void start_kernel(const char* name, const at::Tensor& t, c10::function_ref<int(void* stream)> start) {
  const c10::DeviceGuard device(t.device());
  const c10::impl::VirtualGuardImpl guard(t.device().type());
  const int error = start(guard.getStreamNativeHandle(guard.getStream(t.device())));
  if (error == 0) return;
  throw std::runtime_error(
      fmt::format("the kernel {} could not be started: CUDA error {}; a kernel or a check of before may be the cause",
                  name, error));
}

}  // namespace tessera

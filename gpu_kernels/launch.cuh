#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/gpu_kernels/numbers.h"

// These functions start the kernels.
namespace tessera::gpu {

template <>
inline constexpr int kDigits<__half> = 11;
template <>
inline constexpr int kDigits<__nv_bfloat16> = 8;

constexpr int kThreads = 256;
// Is enough for each multiprocessor to have all the threads that it can hold several times over.
constexpr int64_t kBlocksPerProcessor = 32;

inline __device__ int64_t worker() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
inline __device__ int64_t workers() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// Returns the number of a draw; `base`, which may be null, is a number that a graph changes between its replays.
inline __device__ uint64_t number_of(uint64_t draw, const uint64_t* base) {
  return base == nullptr ? draw : draw + *base;
}

// Returns an error. CUDA keeps it too, and LibTorch would find it after its next kernel and take it for that one's.
inline cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Sets `blocks` to `wanted`, but at most to what keeps the current device busy.
inline cudaError_t limit_blocks(int64_t wanted, dim3& blocks) {
  int device = 0;
  int processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return taken(error);
  const cudaError_t error = taken(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t most = processors * kBlocksPerProcessor;
  blocks = dim3(static_cast<unsigned>(wanted < most ? wanted : most));
  return error;
}

// Starts `kernel` with blocks of kThreads threads: as many as `wanted`, but at most what keeps the device busy.
template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), int64_t wanted, void* stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  if (const cudaError_t error = limit_blocks(wanted, config.gridDim); error != cudaSuccess) return error;
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return taken(cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...));
}

// Returns how many blocks have a thread for each of `items`.
inline int64_t blocks_for(int64_t items) { return (items + kThreads - 1) / kThreads; }

template <class T>
struct Type {
  using Of = T;
};

// Call run(Type<T>{}) with the type of that name, or return an error where it is none.
template <class Run>
cudaError_t with_floating(Number number, const Run& run) {
  switch (number) {
    case Number::kFloat: return run(Type<float>{});
    case Number::kDouble: return run(Type<double>{});
    case Number::kHalf: return run(Type<__half>{});
    case Number::kBfloat16: return run(Type<__nv_bfloat16>{});
    default: return cudaErrorInvalidValue;
  }
}
template <class Run>
cudaError_t with_computed(Number number, const Run& run) {
  switch (number) {
    case Number::kFloat: return run(Type<float>{});
    case Number::kDouble: return run(Type<double>{});
    default: return cudaErrorInvalidValue;
  }
}
template <class Run>
cudaError_t with_any(Number number, const Run& run) {
  switch (number) {
    case Number::kByte: return run(Type<uint8_t>{});
    case Number::kChar: return run(Type<int8_t>{});
    case Number::kShort: return run(Type<int16_t>{});
    case Number::kInt: return run(Type<int32_t>{});
    case Number::kLong: return run(Type<int64_t>{});
    case Number::kBool: return run(Type<bool>{});
    default: return with_floating(number, run);
  }
}

}  // namespace tessera::gpu

// The kernels that draw random numbers; see interface.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tessera/gpu_kernels/fill.h"

namespace tessera::gpu {

template <>
inline constexpr int kDigits<__half> = 11;
template <>
inline constexpr int kDigits<__nv_bfloat16> = 8;

namespace {

constexpr int kThreads = 256;
// Leaves each thread 64 registers, or 80 where it makes 16 numbers of a byte at once, so that none has to be spilled.
template <class Make>
constexpr int kBlocksAtOnce = sizeof(typename Make::Value) == 1 ? 3 : 4;
// Is enough for each multiprocessor to have all the threads that it can hold several times over.
constexpr int64_t kBlocksPerProcessor = 32;

__device__ int64_t worker() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ int64_t workers() { return static_cast<int64_t>(gridDim.x) * kThreads; }

__device__ uint64_t number_of(uint64_t draw, const uint64_t* base) { return base == nullptr ? draw : draw + *base; }

template <class Make>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<Make>)
    stretch_kernel(typename Make::Value* out, int64_t count, uint64_t offset, uint64_t seed, uint64_t draw,
                   const uint64_t* base, Make make) {
  fill_stretch(out, count, offset, seed, number_of(draw, base), make, worker(), workers());
}

template <class Make>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<Make>)
    piece_kernel(typename Make::Value* out, int64_t count, const __grid_constant__ PieceTable piece, uint64_t seed,
                 uint64_t draw, const uint64_t* base, Make make, bool aligned) {
  fill_piece(out, count, piece, seed, number_of(draw, base), make, aligned, worker(), workers());
}

// Sets `grid` to what `groups` threads need, up to what keeps the current device busy.
cudaError_t choose_grid(int64_t groups, dim3& grid) {
  int device = 0;
  int processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t wanted = (groups + kThreads - 1) / kThreads;
  const int64_t most = processors * kBlocksPerProcessor;
  grid = dim3(static_cast<unsigned>(wanted < most ? wanted : most));
  return error;
}

template <class Make>
cudaError_t launch(const Draw& request, const Make& make, cudaStream_t stream) {
  auto* const out = static_cast<typename Make::Value*>(request.out);
  const Dim& dim = request.piece.dims[0];
  const bool stretch = request.piece.ndim == 1 && dim.count == 0 && dim.block >= dim.held &&
                       dim.begin % Make::kPerBlock == 0 && is_aligned(out, kStretchGroup<Make>);
  const int64_t group = stretch ? kStretchGroup<Make> : kPieceGroup;
  dim3 grid;
  if (const cudaError_t error = choose_grid((request.count + group - 1) / group, grid); error != cudaSuccess) {
    return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  if (stretch) {
    return cudaLaunchKernelEx(&config, &stretch_kernel<Make>, out, request.count, static_cast<uint64_t>(dim.begin),
                              request.seed, request.draw, request.base, make);
  }
  return cudaLaunchKernelEx(&config, &piece_kernel<Make>, out, request.count, request.piece, request.seed, request.draw,
                            request.base, make, is_aligned(out, kPieceGroup));
}

template <class T>
struct Type {
  using Of = T;
};

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

cudaError_t draw(const Draw& r, cudaStream_t stream) {
  if (r.count == 0) return cudaSuccess;
  switch (r.kind) {
    case Kind::kUniform:
      return with_floating(r.number, [&]<class T>(Type<T>) { return launch(r, Uniform<T>(r.a, r.b), stream); });
    case Kind::kNormal:
      return with_floating(r.number, [&]<class T>(Type<T>) { return launch(r, Normal<T>(r.a, r.b), stream); });
    case Kind::kExponential:
      return with_floating(r.number, [&]<class T>(Type<T>) { return launch(r, Exponential<T>(r.a), stream); });
    case Kind::kIntegers:
      return with_any(r.number, [&]<class T>(Type<T>) { return launch(r, Integers<T>(r.first, r.range), stream); });
    case Kind::kBernoulli:
      return with_any(r.number, [&]<class T>(Type<T>) { return launch(r, Bernoulli<T>(r.a), stream); });
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace tessera::gpu

int tessera_gpu_draw(const tessera::gpu::Draw* request, void* cuda_stream) {
  return tessera::gpu::draw(*request, static_cast<cudaStream_t>(cuda_stream));
}

int tessera_gpu_interface_version() { return tessera::gpu::kInterfaceVersion; }

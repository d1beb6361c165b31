// The kernel of dropout; see interface.h.

#include "tessera/gpu_kernels/dropout.h"

#include "tessera/gpu_kernels/launch.cuh"

namespace tessera::gpu {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    dropout_kernel(const __grid_constant__ Dropout request, Bernoulli<bool> event, bool stretch, bool aligned) {
  const uint64_t draw = number_of(request.draw, request.base);
  // Two loops, each of which keeps the registers of its own case alone.
  if (stretch) {
    drop<T>(request, event, draw, true, aligned, worker(), workers());
  } else {
    drop<T>(request, event, draw, false, aligned, worker(), workers());
  }
}

template <class T>
cudaError_t launch(const Dropout& request, void* stream) {
  constexpr int kGroup = kDropoutGroup<T>;
  const bool stretch = begins_at_block(request.piece, Bernoulli<bool>::kPerBlock);
  return start(&dropout_kernel<T>, blocks_for((request.count + kGroup - 1) / kGroup), stream, request,
               Bernoulli<bool>(request.kept), stretch, is_aligned<T>(request));
}

}  // namespace
}  // namespace tessera::gpu

int tessera_gpu_dropout(const tessera::gpu::Dropout* request, void* cuda_stream) {
  using namespace tessera::gpu;
  if (request->count == 0) return cudaSuccess;
  return with_floating(request->number, [&]<class T>(Type<T>) { return launch<T>(*request, cuda_stream); });
}

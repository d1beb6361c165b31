// The kernels of the cross entropy of logits whose classes are cut; see interface.h. Where logits are read, a
// block of threads has a row; in the two kernels between, a thread has one.

#include "tessera/gpu_kernels/cross_entropy.h"

#include <cassert>

#include "tessera/gpu_kernels/launch.cuh"

namespace tessera::gpu {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

template <class C>
__device__ ExpSum<C> merged_in_warp(ExpSum<C> mine, int lanes) {
  TESSERA_UNROLL
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const C greatest = __shfl_down_sync(~0U, mine.greatest, distance);
    mine = merged(mine, ExpSum<C>{greatest, __shfl_down_sync(~0U, mine.sum, distance)});
  }
  return mine;
}

// Returns the sum over all threads of the block, to its first thread alone.
template <class C>
__device__ ExpSum<C> merged_in_block(const ExpSum<C>& mine) {
  __shared__ C greatest[kWarps];
  __shared__ C sums[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const ExpSum<C> of_warp = merged_in_warp(mine, kWarp);
  __syncthreads();  // the row before has been read
  if (lane == 0) {
    greatest[warp] = of_warp.greatest;
    sums[warp] = of_warp.sum;
  }
  __syncthreads();
  ExpSum<C> all;
  if (warp > 0) return all;
  if (lane < kWarps) all = {greatest[lane], sums[lane]};
  return merged_in_warp(all, kWarps);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) sums_kernel(const __grid_constant__ LogitSums request) {
  for (int64_t row = blockIdx.x; row < request.rows; row += gridDim.x) {
    const auto sum = merged_in_block(sum_of_row<T>(request, row, static_cast<int>(threadIdx.x), kThreads));
    if (threadIdx.x > 0) continue;
    assert(is_valid(request.targets, row) && "sharded_cross_entropy: a target is out of the classes' bounds");
    store_sums<T>(request, row, sum);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads) terms_kernel(const __grid_constant__ LogitTerms request) {
  for (int64_t row = worker(); row < request.rows; row += workers()) store_terms<C>(request, row);
}

template <class C>
__global__ void __launch_bounds__(kThreads) losses_kernel(const __grid_constant__ LogitLosses request) {
  for (int64_t row = worker(); row < request.rows; row += workers()) store_loss<C>(request, row);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) gradient_kernel(const __grid_constant__ LogitGradient request) {
  for (int64_t row = blockIdx.x; row < request.rows; row += gridDim.x) {
    gradient_of_row<T>(request, row, static_cast<int>(threadIdx.x), kThreads);
  }
}

}  // namespace
}  // namespace tessera::gpu

int tessera_gpu_logit_sums(const tessera::gpu::LogitSums* request, void* cuda_stream) {
  using namespace tessera::gpu;
  if (request->rows == 0) return cudaSuccess;
  return with_floating(request->number,
                       [&]<class T>(Type<T>) { return start(&sums_kernel<T>, request->rows, cuda_stream, *request); });
}

int tessera_gpu_logit_terms(const tessera::gpu::LogitTerms* request, void* cuda_stream) {
  using namespace tessera::gpu;
  if (request->rows == 0) return cudaSuccess;
  return with_computed(request->number, [&]<class C>(Type<C>) {
    return start(&terms_kernel<C>, blocks_for(request->rows), cuda_stream, *request);
  });
}

int tessera_gpu_logit_losses(const tessera::gpu::LogitLosses* request, void* cuda_stream) {
  using namespace tessera::gpu;
  if (request->rows == 0) return cudaSuccess;
  return with_computed(request->number, [&]<class C>(Type<C>) {
    return start(&losses_kernel<C>, blocks_for(request->rows), cuda_stream, *request);
  });
}

int tessera_gpu_logit_gradient(const tessera::gpu::LogitGradient* request, void* cuda_stream) {
  using namespace tessera::gpu;
  if (request->rows == 0 || request->columns == 0) return cudaSuccess;
  return with_floating(request->number, [&]<class T>(Type<T>) {
    return start(&gradient_kernel<T>, request->rows, cuda_stream, *request);
  });
}

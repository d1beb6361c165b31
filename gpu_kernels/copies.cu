// The kernel that makes many copies at once; see interface.h.

#include "tessera/gpu_kernels/copies.h"

#include "tessera/gpu_kernels/launch.cuh"

namespace tessera::gpu {
namespace {

static_assert(kThreads == kTileThreads);

// A launch of few copies need not carry the parameters of many.
constexpr int kFew = 16;
constexpr int kMany = 200;
static_assert(sizeof(CopyTable<kMany>) <= 32764);  // what parameters may have in all

template <int kRoom>
__global__ void __launch_bounds__(kThreads, 3) copies_kernel(const __grid_constant__ CopyTable<kRoom> table) {
  for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    copy_tile(table, tile, threadIdx.x);
  }
}

template <int kRoom>
cudaError_t launch(const Copies& request, void* stream) {
  CopyTable<kRoom> table;
  for (int64_t done = 0; done < request.count;) {
    done += fill_table(table, request.copies + done, request.count - done);
    if (table.tiles == 0) continue;
    if (const cudaError_t error = start(&copies_kernel<kRoom>, table.tiles, stream, table); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace tessera::gpu

int tessera_gpu_copy(const tessera::gpu::Copies* request, void* cuda_stream) {
  using namespace tessera::gpu;
  return request->count <= kFew ? launch<kFew>(*request, cuda_stream) : launch<kMany>(*request, cuda_stream);
}

// The kernel of an embedding whose table is cut along its rows; see interface.h.

#include "tessera/gpu_kernels/masked_rows.h"

#include <cassert>

#include "tessera/gpu_kernels/launch.cuh"

namespace tessera::gpu {
namespace {

template <class Index, class Word>
__global__ void __launch_bounds__(kThreads) masked_rows_kernel(const __grid_constant__ MaskedRows request) {
  for (int64_t at = worker(); at < request.count * request.words; at += workers()) {
    const bool valid = copy_masked<Index, Word>(request, at);
    assert(valid && "an index of an embedding is outside the table's rows");
  }
}

template <class Index>
cudaError_t launch(const MaskedRows& request, void* stream) {
  return with_word(request.word, [&]<class Word>(Word) {
    return start(&masked_rows_kernel<Index, Word>, blocks_for(request.count * request.words), stream, request);
  });
}

}  // namespace
}  // namespace tessera::gpu

int tessera_gpu_masked_rows(const tessera::gpu::MaskedRows* request, void* cuda_stream) {
  using namespace tessera::gpu;
  if (request->count == 0 || request->words == 0) return cudaSuccess;
  switch (request->index) {
    case Number::kInt: return launch<int32_t>(*request, cuda_stream);
    case Number::kLong: return launch<int64_t>(*request, cuda_stream);
    default: return cudaErrorInvalidValue;
  }
}

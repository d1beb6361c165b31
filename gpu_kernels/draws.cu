// The kernels that draw random numbers; see interface.h.

#include "tessera/gpu_kernels/fill.h"
#include "tessera/gpu_kernels/launch.cuh"

namespace tessera::gpu {
namespace {

// Leaves each thread 64 registers, or 80 where it makes 16 numbers of a byte at once, so that none has to be spilled.
template <class Make>
constexpr int kBlocksAtOnce = sizeof(typename Make::Value) == 1 ? 3 : 4;

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

template <class Make>
cudaError_t launch(const Draw& request, const Make& make, void* stream) {
  auto* const out = static_cast<typename Make::Value*>(request.out);
  const Dim& dim = request.piece.dims[0];
  if (begins_at_block(request.piece, Make::kPerBlock) && is_aligned(out, kStretchGroup<Make>)) {
    const int64_t groups = (request.count + kStretchGroup<Make> - 1) / kStretchGroup<Make>;
    return start(&stretch_kernel<Make>, blocks_for(groups), stream, out, request.count,
                 static_cast<uint64_t>(dim.begin), request.seed, request.draw, request.base, make);
  }
  const int64_t groups = (request.count + kPieceGroup - 1) / kPieceGroup;
  return start(&piece_kernel<Make>, blocks_for(groups), stream, out, request.count, request.piece, request.seed,
               request.draw, request.base, make, is_aligned(out, kPieceGroup));
}

cudaError_t draw(const Draw& r, void* stream) {
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
  return tessera::gpu::draw(*request, cuda_stream);
}

int tessera_gpu_interface_version() { return tessera::gpu::kInterfaceVersion; }

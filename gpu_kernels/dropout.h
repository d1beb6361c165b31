#pragma once

#include <cstdint>

#include "tessera/gpu_kernels/fill.h"
#include "tessera/gpu_kernels/interface.h"
#include "tessera/gpu_kernels/numbers.h"

// One thread of a GPU does this in a dropout. Tests call it on the host.
namespace tessera::gpu {

// Is how many numbers of T a thread makes at once: 16 bytes, but at least one block of events.
template <class T>
inline constexpr int kDropoutGroup = Bernoulli<bool>::kPerBlock * sizeof(T) < 16
                                         ? static_cast<int>(16 / sizeof(T))
                                         : static_cast<int>(Bernoulli<bool>::kPerBlock);

// Says whether all three tensors of a dropout are aligned to a group.
template <class T>
bool is_aligned(const Dropout& request) {
  constexpr int kGroup = kDropoutGroup<T>;
  return is_aligned(static_cast<const T*>(request.in), kGroup) &&
         is_aligned(static_cast<const T*>(request.out), kGroup) && is_aligned(request.mask, kGroup);
}

// Writes a group of results and of the mask. Rounds as two products do, of which the first is exact.
template <int N, class T>
TESSERA_BOTH void drop_group(const Dropout& request, const bool (&kept)[N], int64_t local, bool aligned) {
  using C = Computed<T>;
  const auto scale = static_cast<C>(request.scale);
  T values[N];
  load_group(values, static_cast<const T*>(request.in), local, request.count, aligned, T(0));
  TESSERA_UNROLL
  for (int i = 0; i < N; ++i) values[i] = number<T>(static_cast<C>(values[i]) * static_cast<C>(kept[i]) * scale);
  store_group(static_cast<T*>(request.out), values, local, request.count, aligned);
  store_group(request.mask, kept, local, request.count, aligned);
}

// Does the part of a dropout that is `worker` modulo `workers`. `draw` is the number of the draw. `stretch` says
// whether begins_at_block(request.piece, ...), and `aligned` whether is_aligned<T>(request).
template <class T>
TESSERA_BOTH void drop(const Dropout& request, const Bernoulli<bool>& event, uint64_t draw, bool stretch, bool aligned,
                       int64_t worker, int64_t workers) {
  constexpr int kGroup = kDropoutGroup<T>;
  for (int64_t local = worker * kGroup; local < request.count; local += workers * kGroup) {
    bool kept[kGroup];
    if (stretch) {
      make_in_stretch(kept, local, request.count, static_cast<uint64_t>(request.piece.dims[0].begin), request.seed,
                      draw, event);
    } else {
      make_in_piece(kept, local, request.count, request.piece, request.seed, draw, event);
    }
    drop_group<kGroup, T>(request, kept, local, aligned);
  }
}

}  // namespace tessera::gpu

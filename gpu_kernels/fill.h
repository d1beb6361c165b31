#pragma once

#include <cstdint>
#include <cstring>

#include "tessera/gpu_kernels/draw_functions.h"
#include "tessera/gpu_kernels/interface.h"

#ifdef __CUDA_ARCH__
#define TESSERA_UNROLL _Pragma("unroll")
#else
#define TESSERA_UNROLL
#endif

// These functions are the part that one thread of a GPU has in a draw. They run on the host too, where tests call them.
namespace tessera::gpu {

// Divides, in 32 bits where the numbers allow it.
inline TESSERA_BOTH uint64_t quotient(uint64_t a, uint64_t b) {
  return ((a | b) >> 32) == 0 ? uint64_t{static_cast<uint32_t>(a) / static_cast<uint32_t>(b)} : a / b;
}

// Is an element's place in the global tensor, and how many elements of the piece, from this one on, are adjacent there.
struct GlobalPlace {
  uint64_t global;
  int64_t adjacent;
};

// Returns the place of the held index `index` among all indices of the dimension.
inline TESSERA_BOTH GlobalPlace place_in(const PieceTable& piece, const Dim& dim, int64_t index) {
  if (dim.count == 0) {
    if (dim.block >= dim.held) return {static_cast<uint64_t>(dim.begin + index), dim.held - index};
    const auto block = static_cast<int64_t>(quotient(static_cast<uint64_t>(index), static_cast<uint64_t>(dim.block)));
    const int64_t inside = index - block * dim.block;
    const int64_t in_block = dim.block - inside;
    const int64_t in_all = dim.held - index;
    return {static_cast<uint64_t>(dim.begin + block * dim.period + inside), in_block < in_all ? in_block : in_all};
  }
  int32_t at = dim.first;
  int32_t end = dim.first + dim.count;  // the interval is one of [at, end)
  while (end - at > 1) {
    const int32_t middle = (at + end) / 2;
    if (piece.intervals[middle].before <= index) {
      at = middle;
    } else {
      end = middle;
    }
  }
  const bool last = at + 1 == dim.first + dim.count;
  const int64_t behind = last ? dim.held : piece.intervals[at + 1].before;
  const HeldInterval& interval = piece.intervals[at];
  return {static_cast<uint64_t>(interval.begin + (index - interval.before)), behind - index};
}

// Returns the place of element `local` of the piece in the global tensor.
inline TESSERA_BOTH GlobalPlace place_of(const PieceTable& piece, int64_t local) {
  int32_t d = piece.ndim - 1;
  auto rest = static_cast<uint64_t>(local);
  uint64_t outer = d > 0 ? quotient(rest, static_cast<uint64_t>(piece.dims[d].held)) : 0;
  GlobalPlace place =
      place_in(piece, piece.dims[d], static_cast<int64_t>(rest - outer * static_cast<uint64_t>(piece.dims[d].held)));
  auto stride = static_cast<uint64_t>(piece.dims[d].size);
  for (--d; d >= 0; --d) {
    const Dim& dim = piece.dims[d];
    rest = outer;
    outer = d > 0 ? quotient(rest, static_cast<uint64_t>(dim.held)) : 0;
    const auto index = static_cast<int64_t>(rest - outer * static_cast<uint64_t>(dim.held));
    place.global += stride * place_in(piece, dim, index).global;
    stride *= static_cast<uint64_t>(dim.size);
  }
  return place;
}

// Stores N neighbouring numbers by as few instructions as there can be. `at` must be aligned to all of them, up to 16
// bytes.
template <int N, class T>
TESSERA_BOTH void store(T* at, const T (&values)[N]) {
#ifdef __CUDA_ARCH__
  constexpr int kBytes = N * sizeof(T);
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes % 8 == 0, uint2, uint32_t>>;
  static_assert(kBytes % sizeof(Word) == 0);
  constexpr int kWords = kBytes / sizeof(Word);
  Word words[kWords];
  memcpy(words, values, kBytes);
  TESSERA_UNROLL
  for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(at)[i] = words[i];
#else
  for (int i = 0; i < N; ++i) at[i] = values[i];
#endif
}

// Are how many numbers a thread makes at once: in a stretch 16 bytes, but at least one block, and only one where it
// reads for each number; four in any other piece.
template <class Make>
inline constexpr int kStretchGroup = Make::kReads || 16 / sizeof(typename Make::Value) < Make::kPerBlock
                                         ? Make::kPerBlock
                                         : static_cast<int>(16 / sizeof(typename Make::Value));
inline constexpr int kPieceGroup = 4;

template <class T>
inline bool is_aligned(const T* at, int numbers) {
  const uint64_t bytes = numbers * sizeof(T);
  return reinterpret_cast<uintptr_t>(at) % (bytes < 16 ? bytes : 16) == 0;
}

// Makes the numbers of a piece whose element i is element `offset` + i of the global tensor: those of every group that
// is `worker` modulo `workers`. `offset` must be a multiple of Make::kPerBlock, and `out` must be aligned to a group.
template <class Make>
TESSERA_BOTH void fill_stretch(typename Make::Value* out, int64_t count, uint64_t offset, uint64_t seed, uint64_t draw,
                               const Make& make, int64_t worker, int64_t workers) {
  constexpr int kGroup = kStretchGroup<Make>;
  constexpr int kPerBlock = Make::kPerBlock;
  for (int64_t local = worker * kGroup; local < count; local += workers * kGroup) {
    typename Make::Value values[kGroup];
    const uint64_t block = (offset + static_cast<uint64_t>(local)) / kPerBlock;
    TESSERA_UNROLL
    for (int b = 0; b < kGroup / kPerBlock; ++b) {
      const PhiloxWords words = words_of(seed, draw, block + b);
      TESSERA_UNROLL
      for (int lane = 0; lane < kPerBlock; ++lane) {
        const int64_t i = local + b * kPerBlock + lane;
        values[b * kPerBlock + lane] = make(words, lane, i < count ? i : count - 1);
      }
    }
    if (local + kGroup <= count) {
      store(out + local, values);
      continue;
    }
    TESSERA_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      if (local + i < count) out[local + i] = values[i];
    }
  }
}

// Does the same for any piece. `aligned` says whether `out` is aligned to a group.
template <class Make>
TESSERA_BOTH void fill_piece(typename Make::Value* out, int64_t count, const PieceTable& piece, uint64_t seed,
                             uint64_t draw, const Make& make, bool aligned, int64_t worker, int64_t workers) {
  constexpr int kPerBlock = Make::kPerBlock;
  for (int64_t local = worker * kPieceGroup; local < count; local += workers * kPieceGroup) {
    typename Make::Value values[kPieceGroup];
    GlobalPlace place{0, 0};
    uint64_t block = 0;
    PhiloxWords words{};
    TESSERA_UNROLL
    for (int i = 0; i < kPieceGroup; ++i) {
      const int64_t at = local + i < count ? local + i : count - 1;
      if (place.adjacent == 0) place = place_of(piece, at);
      if (i == 0 || place.global / kPerBlock != block) {
        block = place.global / kPerBlock;
        words = words_of(seed, draw, block);
      }
      values[i] = make(words, place.global % kPerBlock, at);
      ++place.global;
      --place.adjacent;
    }
    if (aligned && local + kPieceGroup <= count) {
      store(out + local, values);
      continue;
    }
    TESSERA_UNROLL
    for (int i = 0; i < kPieceGroup; ++i) {
      if (local + i < count) out[local + i] = values[i];
    }
  }
}

}  // namespace tessera::gpu

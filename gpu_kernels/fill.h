#pragma once

#include <cstdint>

#include "tessera/gpu_kernels/draw_functions.h"
#include "tessera/gpu_kernels/interface.h"
#include "tessera/gpu_kernels/numbers.h"

// These functions are the part that one thread of a GPU has in a draw. They run on the host too, where tests call them.
namespace tessera::gpu {

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

// Are how many numbers a thread makes at once: in a stretch 16 bytes, but at least one block, and only one where it
// reads for each number; four in any other piece.
template <class Make>
inline constexpr int kStretchGroup = Make::kReads || 16 / sizeof(typename Make::Value) < Make::kPerBlock
                                         ? Make::kPerBlock
                                         : static_cast<int>(16 / sizeof(typename Make::Value));
inline constexpr int kPieceGroup = 4;

// Says whether the piece is one stretch whose first element begins a block of `per_block` numbers.
inline bool begins_at_block(const PieceTable& piece, int per_block) {
  const Dim& dim = piece.dims[0];
  return piece.ndim == 1 && dim.count == 0 && dim.block >= dim.held && dim.begin % per_block == 0;
}

// Makes the kGroup numbers of a piece from element `local` on, of `count` elements. Element i of the piece is element
// `offset` + i of the global tensor, and `offset` and `local` are multiples of Make::kPerBlock.
template <int kGroup, class Make>
TESSERA_BOTH void make_in_stretch(typename Make::Value (&values)[kGroup], int64_t local, int64_t count, uint64_t offset,
                                  uint64_t seed, uint64_t draw, const Make& make) {
  constexpr int kPerBlock = Make::kPerBlock;
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
}

// Does the same for any piece.
template <int kGroup, class Make>
TESSERA_BOTH void make_in_piece(typename Make::Value (&values)[kGroup], int64_t local, int64_t count,
                                const PieceTable& piece, uint64_t seed, uint64_t draw, const Make& make) {
  constexpr int kPerBlock = Make::kPerBlock;
  GlobalPlace place{0, 0};
  uint64_t block = 0;
  PhiloxWords words{};
  TESSERA_UNROLL
  for (int i = 0; i < kGroup; ++i) {
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
}

// Makes the numbers of a stretch (see make_in_stretch): those of every group that is `worker` modulo `workers`. `out`
// must be aligned to a group.
template <class Make>
TESSERA_BOTH void fill_stretch(typename Make::Value* out, int64_t count, uint64_t offset, uint64_t seed, uint64_t draw,
                               const Make& make, int64_t worker, int64_t workers) {
  constexpr int kGroup = kStretchGroup<Make>;
  for (int64_t local = worker * kGroup; local < count; local += workers * kGroup) {
    typename Make::Value values[kGroup];
    make_in_stretch(values, local, count, offset, seed, draw, make);
    store_group(out, values, local, count, /*aligned=*/true);
  }
}

// Does the same for any piece. `aligned` says whether `out` is aligned to a group.
template <class Make>
TESSERA_BOTH void fill_piece(typename Make::Value* out, int64_t count, const PieceTable& piece, uint64_t seed,
                             uint64_t draw, const Make& make, bool aligned, int64_t worker, int64_t workers) {
  for (int64_t local = worker * kPieceGroup; local < count; local += workers * kPieceGroup) {
    typename Make::Value values[kPieceGroup];
    make_in_piece(values, local, count, piece, seed, draw, make);
    store_group(out, values, local, count, aligned);
  }
}

}  // namespace tessera::gpu

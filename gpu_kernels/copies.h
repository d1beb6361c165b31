#pragma once

#include <cstdint>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/gpu_kernels/numbers.h"

// One thread of a GPU does this in a launch that makes many copies. Tests call it on the host.
namespace tessera::gpu {

// Copies are cut into tiles, one for a block of threads at a time, of which each thread copies kTileWords words.
inline constexpr int kTileThreads = 256;
inline constexpr int kTileWords = 4;

inline TESSERA_BOTH int32_t word_count(const Copy& copy) {
  int32_t words = 1;
  for (int32_t d = 0; d < copy.ndim; ++d) words *= copy.sizes[d];
  return words;
}
inline int64_t tiles_of(const Copy& copy) {
  constexpr int64_t kTile = kTileThreads * kTileWords;
  return (word_count(copy) + kTile - 1) / kTile;
}

// Holds the copies of one launch. It is passed to the kernel by value, so that nothing has to be copied before it.
template <int kRoom>
struct CopyTable {
  int64_t tiles;
  int32_t count;
  int32_t unused;
  int64_t first_tile[kRoom];  // of each copy
  Copy copies[kRoom];
};

// Sets `table` to the next copies of `count`, at most as many as it has room for, and returns how many.
template <int kRoom>
int64_t fill_table(CopyTable<kRoom>& table, const Copy* copies, int64_t count) {
  table.count = static_cast<int32_t>(count < kRoom ? count : kRoom);
  table.tiles = 0;
  for (int32_t i = 0; i < table.count; ++i) {
    table.copies[i] = copies[i];
    table.first_tile[i] = table.tiles;
    table.tiles += tiles_of(copies[i]);
  }
  return table.count;
}

// Returns the copy that a tile belongs to.
template <int kRoom>
TESSERA_BOTH int32_t copy_of(const CopyTable<kRoom>& table, int64_t tile) {
  int32_t at = 0;
  int32_t end = table.count;  // the copy is one of [at, end)
  while (end - at > 1) {
    const int32_t middle = (at + end) / 2;
    if (table.first_tile[middle] <= tile) {
      at = middle;
    } else {
      end = middle;
    }
  }
  return at;
}

// Holds a word's place in both memories, in words.
struct WordPlace {
  int64_t from;
  int64_t to;
};

inline TESSERA_BOTH WordPlace place_of(const Copy& copy, uint32_t word) {
  WordPlace place{0, 0};
  for (int32_t d = copy.ndim - 1; d > 0; --d) {
    const auto size = static_cast<uint32_t>(copy.sizes[d]);
    const uint32_t outer = word / size;
    const uint32_t index = word - outer * size;
    place.from += index * copy.from_strides[d];
    place.to += index * copy.to_strides[d];
    word = outer;
  }
  place.from += word * copy.from_strides[0];
  place.to += word * copy.to_strides[0];
  return place;
}

// Copies the words of thread `thread` in tile `tile` of a copy. All are read before one is written, so that several
// readings are under way.
template <class Word>
TESSERA_BOTH void copy_words(const Copy& copy, uint32_t tile, uint32_t thread) {
  const uint32_t first = tile * (kTileThreads * kTileWords) + thread;
  const auto count = static_cast<uint32_t>(word_count(copy));
  Word words[kTileWords];
  int64_t to[kTileWords];
  TESSERA_UNROLL
  for (uint32_t i = 0; i < kTileWords; ++i) {
    if (first + i * kTileThreads >= count) continue;
    const WordPlace place = place_of(copy, first + i * kTileThreads);
    words[i] = static_cast<const Word*>(copy.from)[place.from];
    to[i] = place.to;
  }
  TESSERA_UNROLL
  for (uint32_t i = 0; i < kTileWords; ++i) {
    if (first + i * kTileThreads < count) static_cast<Word*>(copy.to)[to[i]] = words[i];
  }
}

// Does what thread `thread` has to do in tile `tile` of a table.
template <int kRoom>
TESSERA_BOTH void copy_tile(const CopyTable<kRoom>& table, int64_t tile, uint32_t thread) {
  const int32_t at = copy_of(table, tile);
  const Copy& copy = table.copies[at];
  const auto inside = static_cast<uint32_t>(tile - table.first_tile[at]);
  switch (copy.word) {
    case 16: return copy_words<WideWord>(copy, inside, thread);
    case 8: return copy_words<uint64_t>(copy, inside, thread);
    case 4: return copy_words<uint32_t>(copy, inside, thread);
    case 2: return copy_words<uint16_t>(copy, inside, thread);
    default: return copy_words<uint8_t>(copy, inside, thread);
  }
}

}  // namespace tessera::gpu

#pragma once

#include <cstdint>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/gpu_kernels/numbers.h"

// One thread of a GPU does this in an embedding whose table is cut along its rows. Tests call it on the host.
namespace tessera::gpu {

// Says whether an id names a row of the whole table.
inline TESSERA_BOTH bool is_valid(const MaskedRows& request, int64_t id) { return id >= 0 && id < request.rows; }

// Writes word `at` of the result, counted through all its rows, and returns whether its id names a row of the table.
template <class Index, class Word>
TESSERA_BOTH bool copy_masked(const MaskedRows& request, int64_t at) {
  const auto row = static_cast<int64_t>(quotient(static_cast<uint64_t>(at), static_cast<uint64_t>(request.words)));
  const int64_t id = static_cast<const Index*>(request.ids)[row];
  const bool here = id >= request.begin && id < request.end;
  const int64_t from = (id - request.begin) * request.stride + (at - row * request.words);
  static_cast<Word*>(request.out)[at] = here ? static_cast<const Word*>(request.table)[from] : Word{};
  return is_valid(request, id);
}

}  // namespace tessera::gpu

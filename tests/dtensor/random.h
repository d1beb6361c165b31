#pragma once

#include <cstdint>
#include <random>

namespace tessera::testing {

using Random = std::mt19937;

// Returns a number from 0 to below - 1, the same on every rank and platform.
inline int64_t pick(Random& random, int64_t below) {
  return static_cast<int64_t>(random() % static_cast<unsigned>(below));
}
// Returns true once in `of` times.
inline bool chance(Random& random, int64_t of) { return pick(random, of) == 0; }

}  // namespace tessera::testing

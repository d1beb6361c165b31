#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace tessera::testing {

using Random = std::mt19937;

// Returns a number from 0 to below - 1, the same on every rank and platform.
inline int64_t pick(Random& random, int64_t below) {
  return static_cast<int64_t>(random() % static_cast<unsigned>(below));
}
// Returns true once in `of` times.
inline bool chance(Random& random, int64_t of) { return pick(random, of) == 0; }

// Returns how many cases a test tries: TESSERA_RANDOM_RUNS if it is set.
inline unsigned random_runs(unsigned otherwise) {
  const char* const text = std::getenv("TESSERA_RANDOM_RUNS");
  return text != nullptr ? static_cast<unsigned>(std::stoul(text)) : otherwise;
}

}  // namespace tessera::testing

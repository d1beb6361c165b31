#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// FNV-1a gives the same hash in every process and build, which std::hash does not promise.
inline uint64_t stable_hash(std::string_view text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

}  // namespace tessera

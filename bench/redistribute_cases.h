#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera::bench {

// Describes one redistribution of a float32 tensor over a whole mesh.
struct RedistributeCase {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  Placements from;
  Placements to;

  int64_t bytes() const;
  bool changes_shards() const;  // Shards of one dimension become Shards of another, and nothing else changes
  // text() returns text such as "2,2;64,64;S(0) P(sum);R S(0)", which is sent to our ranks and to the peer's. parse()
  // reads it; throws std::invalid_argument on other text.
  std::string text() const;
  static RedistributeCase parse(const std::string& text);
};

// Returns every pair of two different placements of {S(0), S(1), R, P} on a mesh of `ranks`, and for 4 ranks also 12
// pairs on (2, 2). For each size n there is a tensor of n x n and one of (n - 1) x (n + 1).
std::vector<RedistributeCase> redistribute_cases(int64_t ranks, const std::vector<int64_t>& sizes);

}  // namespace tessera::bench

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera::bench {

// One redistribution of float32 over a whole mesh.
struct RedistributeCase {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  Placements from;
  Placements to;

  int64_t bytes() const;
  bool changes_shards() const;  // Shards of one dimension become Shards of another, and nothing else changes
  // "2,2;64,64;S(0) P(sum);R S(0)": what ranks, ours and the peer's, are told. Back: throws std::invalid_argument.
  std::string text() const;
  static RedistributeCase parse(const std::string& text);
};

// Every pair of {S(0), S(1), R, P} that differs on a mesh of `ranks`, and for 4 ranks 12 pairs on (2, 2); for each size
// n a tensor of n x n and one of (n - 1) x (n + 1).
std::vector<RedistributeCase> redistribute_cases(int64_t ranks, const std::vector<int64_t>& sizes);

}  // namespace tessera::bench

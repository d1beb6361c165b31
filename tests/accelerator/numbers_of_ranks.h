#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/harness/ranks.h"

// Numbers that differ from rank to rank, made late on the accelerator or at once on the CPU, and what collectives make
// of them.
namespace tessera::testing {

inline constexpr double kApart = 1000;  // between the numbers of two ranks

inline at::Tensor mine(int64_t rows, int64_t columns) {
  return late_numbers(kApart * static_cast<double>(rank()), rows, columns);
}
inline at::Tensor of_rank(int64_t rank, int64_t rows, int64_t columns) {
  return numbers_at_once(kApart * static_cast<double>(rank), rows, columns);
}

inline at::Tensor sum_of_ranks(int64_t rows, int64_t columns) {
  at::Tensor out = at::zeros({rows, columns}, at::kDouble);
  for (int64_t r = 0; r < world_size(); ++r) out += of_rank(r, rows, columns);
  return out;
}

inline at::Tensor rows_of_ranks(int64_t rows, int64_t columns) {
  std::vector<at::Tensor> all;
  for (int64_t r = 0; r < world_size(); ++r) all.push_back(of_rank(r, rows, columns));
  return at::stack(all);
}

// Rank r's piece has r + 1 elements.
inline std::vector<int64_t> uneven() {
  std::vector<int64_t> counts;
  for (int64_t r = 0; r < world_size(); ++r) counts.push_back(r + 1);
  return counts;
}
inline int64_t sum_of_uneven() { return world_size() * (world_size() + 1) / 2; }

inline at::Tensor uneven_pieces() {
  std::vector<at::Tensor> all;
  for (int64_t r = 0; r < world_size(); ++r) all.push_back(of_rank(r, 1, r + 1).flatten());
  return at::cat(all);
}

// This rank's piece of the sum of what all ranks have for a reduce_scatter in uneven pieces.
inline at::Tensor uneven_sum() {
  return sum_of_ranks(1, sum_of_uneven()).flatten().narrow(0, rank() * (rank() + 1) / 2, rank() + 1);
}

inline std::vector<int64_t> to_all(int64_t count) {
  return std::vector<int64_t>(static_cast<std::size_t>(world_size()), count);
}

// Rank r sends rank i r + 1 elements.
inline at::Tensor exchanged() {
  std::vector<at::Tensor> all;
  for (int64_t r = 0; r < world_size(); ++r) {
    all.push_back(of_rank(r, 1, (r + 1) * world_size()).flatten().narrow(0, rank() * (r + 1), r + 1));
  }
  return at::cat(all);
}

}  // namespace tessera::testing

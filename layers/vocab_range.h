#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/placement/intervals.h"

namespace tessera {

// Returns numerator / denominator. Throws std::invalid_argument, naming both and `who`, when the quotient is no whole
// number or denominator < 1.
int64_t divide(int64_t numerator, int64_t denominator, std::string_view who = "divide");

// Returns the ids [begin, end) of the vocabulary that rank `rank` of `world_size` holds, where every rank has
// `per_partition_vocab_size` of them:
//   vocab_range_from_per_partition_vocab_size(400, 2, 4) -> [800, 1200)
// Throws std::invalid_argument on a negative size and a rank outside [0, world_size).
Interval vocab_range_from_per_partition_vocab_size(int64_t per_partition_vocab_size, int64_t rank, int64_t world_size);

// Returns the same for a vocabulary of `global_vocab_size` ids in equal parts, or with `allow_uneven` split as
// torch.chunk and Shard(0) split a table: 10 ids over 4 ranks are [0, 3), [3, 6), [6, 9), [9, 10).
// Throws also when the ids are not a multiple of the ranks and allow_uneven is not set.
Interval vocab_range_from_global_vocab_size(int64_t global_vocab_size, int64_t rank, int64_t world_size,
                                            bool allow_uneven = false);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/placement/intervals.h"

namespace tessera {

// numerator / denominator. Throws std::invalid_argument, naming both and `who`, when that is no whole number or
// denominator < 1.
int64_t divide(int64_t numerator, int64_t denominator, std::string_view who = "divide");

// The ids [begin, end) of a vocabulary that rank `rank` of `world_size` holds when it has `per_partition_vocab_size` of
// them, as every rank before it has:
//   vocab_range_from_per_partition_vocab_size(400, 2, 4) -> [800, 1200)
// Throws std::invalid_argument on a negative size and a rank outside [0, world_size).
Interval vocab_range_from_per_partition_vocab_size(int64_t per_partition_vocab_size, int64_t rank, int64_t world_size);

// The same of a vocabulary of `global_vocab_size` ids in equal parts, or with `allow_uneven` in torch.chunk's, which is
// what Shard(0) of the table gives: of 10 ids over 4 ranks [0, 3), [3, 6), [6, 9), [9, 10). Throws, too, on ids that
// the ranks do not divide otherwise.
Interval vocab_range_from_global_vocab_size(int64_t global_vocab_size, int64_t rank, int64_t world_size,
                                            bool allow_uneven = false);

}  // namespace tessera

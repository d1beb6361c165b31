#include "tessera/layers/vocab_range.h"

#include <stdexcept>

#include <fmt/format.h>

#include "tessera/placement/partition.h"

namespace tessera {
namespace {

void check(int64_t size, int64_t rank, int64_t world_size, std::string_view who) {
  if (size < 0) throw std::invalid_argument(fmt::format("{}: a vocabulary of {} ids; give 0 or more", who, size));
  if (rank < 0 || rank >= world_size) {
    throw std::invalid_argument(fmt::format("{}: rank {} is outside [0, {})", who, rank, world_size));
  }
}

}  // namespace

int64_t divide(int64_t numerator, int64_t denominator, std::string_view who) {
  if (denominator < 1)
    throw std::invalid_argument(fmt::format("{}: the number of parts is {}; give at least 1", who, denominator));
  if (numerator % denominator != 0) {
    throw std::invalid_argument(fmt::format("{}: {} is not divisible by {}", who, numerator, denominator));
  }
  return numerator / denominator;
}

Interval vocab_range_from_per_partition_vocab_size(int64_t per_partition_vocab_size, int64_t rank, int64_t world_size) {
  check(per_partition_vocab_size, rank, world_size, "vocab_range_from_per_partition_vocab_size");
  const int64_t begin = rank * per_partition_vocab_size;
  return {.begin = begin, .end = begin + per_partition_vocab_size};
}

Interval vocab_range_from_global_vocab_size(int64_t global_vocab_size, int64_t rank, int64_t world_size,
                                            bool allow_uneven) {
  constexpr std::string_view kWho = "vocab_range_from_global_vocab_size";
  check(global_vocab_size, rank, world_size, kWho);
  if (allow_uneven) return chunk_range(global_vocab_size, world_size, rank);
  return vocab_range_from_per_partition_vocab_size(divide(global_vocab_size, world_size, kWho), rank, world_size);
}

}  // namespace tessera

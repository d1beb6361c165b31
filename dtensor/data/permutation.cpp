#include "tessera/dtensor/data/permutation.h"

#include <bit>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/gpu_kernels/philox.h"

namespace tessera {
namespace {

std::array<uint32_t, 2> words_of(uint64_t value) {
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)};
}

// Returns half the bits that the numbers below `size` take, rounded up.
int half_bits_of(int64_t size) {
  if (size < 1 || size > (int64_t{1} << 62)) {
    throw std::invalid_argument(fmt::format("Permutation: {} elements cannot be permuted; give 1 to 2^62", size));
  }
  return (static_cast<int>(std::bit_width(static_cast<uint64_t>(size - 1))) + 1) / 2;
}

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t number)
    : size_(size), half_bits_(half_bits_of(size)), seed_(words_of(seed)), number_(words_of(number)) {}

uint64_t Permutation::permuted(uint64_t value) const {
  constexpr uint32_t kRounds = 8;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_, right = value & mask;
  for (uint32_t round = 0; round < kRounds; ++round) {
    // At most 31 bits are in a half, so the round's number has a word of its own.
    const uint32_t mixed = detail::philox({static_cast<uint32_t>(right), round, number_[0], number_[1]}, seed_)[0];
    const uint64_t next = left ^ (mixed & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::at(int64_t i) const {
  if (i < 0 || i >= size_) throw std::out_of_range(fmt::format("Permutation: {} is outside [0, {})", i, size_));
  uint64_t value = permuted(static_cast<uint64_t>(i));
  while (value >= static_cast<uint64_t>(size_)) value = permuted(value);
  return static_cast<int64_t>(value);
}

}  // namespace tessera

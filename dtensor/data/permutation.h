#pragma once

#include <array>
#include <cstdint>

namespace tessera {

// Is a permutation of 0 .. size - 1 that follows from a seed and a number, one permutation for each pair. It computes
// each element by itself, in constant time and memory: no list is shuffled or kept.
//
// Invariants: size() >= 1, and for every i in [0, size()) the values at(i) are different and in [0, size()).
//
// A Feistel network of eight rounds of Philox permutes the numbers of an even count of bits, fewer than 4 * size() of
// them. A value outside the range is permuted again until it is inside (cycle walking), which takes less than four
// rounds of this on average. Sources: Black, Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002); Salmon
// and others (2011), for Philox.
class Permutation {
 public:
  // Throws std::invalid_argument unless 1 <= size <= 2^62.
  Permutation(int64_t size, uint64_t seed, uint64_t number);

  int64_t size() const { return size_; }
  // Throws std::out_of_range unless i is in [0, size()).
  int64_t at(int64_t i) const;

 private:
  uint64_t permuted(uint64_t value) const;

  int64_t size_;
  int half_bits_;  // the network permutes numbers of twice as many bits
  std::array<uint32_t, 2> seed_;
  std::array<uint32_t, 2> number_;
};

}  // namespace tessera

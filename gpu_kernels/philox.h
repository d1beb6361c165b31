#pragma once

#include <array>
#include <cstdint>

namespace tessera::detail {

// Computes Philox4x32-10, a function of a counter and a key. Its values pass for independent random numbers, and each
// is computed without those before it. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
// 3" (SC 2011).
using PhiloxWords = std::array<uint32_t, 4>;

constexpr PhiloxWords philox(PhiloxWords counter, std::array<uint32_t, 2> key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = 0xD2511F53ULL * counter[0];
    const uint64_t b = 0xCD9E8D57ULL * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9U, key[1] + 0xBB67AE85U};
  }
  return counter;
}

}  // namespace tessera::detail

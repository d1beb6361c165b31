#pragma once

#include <cstdint>

namespace tessera {

// Which way is fastest over Gloo, on one host of 2 cores: the figures are Gloo's own collective's time over the way's.

// An all-gather of up to so many bytes as an all-to-all (1.2 to 2.4, 2 and 4 ranks; Gloo's own is a ring of n - 1 steps, with copies),
// of more as messages between each two (1.2 to 4).
inline constexpr int64_t kGlooGatherAtOnce = 256 << 10;

// An all-reduce of `bytes` as an all-to-all of everyone's whole terms, which each rank reduces: one step in the place of Gloo's
// 2 (n - 1).
//   4 ranks:  256 B 4.5   4 KiB 3.1   16 KiB 5.2   64 KiB 2.5   256 KiB 1.1   1 MiB 0.5
//   2 ranks:  256 B 0.8   4 KiB 1.4   16 KiB 0.8   64 KiB 0.7   256 KiB 0.9   1 MiB 0.7
constexpr bool gloo_reduces_at_once(int64_t ranks, int64_t bytes) { return ranks > 2 && ranks * bytes <= kGlooGatherAtOnce; }

}  // namespace tessera

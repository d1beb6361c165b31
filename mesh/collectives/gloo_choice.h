#pragma once

#include <cstdint>

namespace tessera {

// These functions choose the fastest algorithm over Gloo on one host. `tools/bench gloo_choice` measured them on 2
// cores. Each figure is the time of Gloo's own collective divided by the algorithm's, for the bytes of each rank.

// Returns whether an all-gather of `bytes` in total runs as an all-to-all; otherwise it runs as messages between each
// pair of ranks.
//   2 ranks, all-to-all   1 KiB 4.6   16 KiB 3.9   256 KiB 2.5   1 MiB 1.6   4 MiB 1.4
//            messages     1 KiB 0.5   16 KiB 1.1   256 KiB 1.2   1 MiB 0.8   4 MiB 1.6
//   4 ranks, all-to-all   256 B 1.6   4 KiB 1.8   64 KiB 1.5   1 MiB 1.3   4 MiB 1.1
//            messages     256 B 1.1   4 KiB 3.2   64 KiB 2.9   1 MiB 1.7   4 MiB 1.6
constexpr bool gloo_gathers_at_once(int64_t ranks, int64_t bytes) {
  return bytes <= (ranks > 2 ? int64_t{4} << 10 : int64_t{4} << 20);
}

// Returns whether an all-reduce of `bytes` gathers the whole terms of all ranks, which each rank reduces: one step
// instead of Gloo's 2 (n - 1).
//   2 ranks   256 B 6.9   4 KiB 9.7   64 KiB 3.0   256 KiB 2.9   1 MiB 1.2   4 MiB 0.6
//   4 ranks   256 B 2.0   4 KiB 2.4   64 KiB 2.5   256 KiB 2.1   1 MiB 1.3   4 MiB 0.4
constexpr bool gloo_reduces_at_once(int64_t ranks, int64_t bytes) {
  return ranks * bytes <= (ranks > 2 ? int64_t{4} << 20 : int64_t{2} << 20);
}

}  // namespace tessera

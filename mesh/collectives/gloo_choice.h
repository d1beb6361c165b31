#pragma once

#include <cstdint>

namespace tessera {

// Which way is fastest over Gloo on one host, measured by tools/bench gloo_choice on 2 cores: the figures are Gloo's
// own collective's time over the way's, by bytes of each rank.

// Whether an all-gather of `bytes` in all goes as an all-to-all; otherwise it goes as messages between each two.
//   2 ranks, all-to-all   1 KiB 4.6   16 KiB 3.9   256 KiB 2.5   1 MiB 1.6   4 MiB 1.4
//            messages     1 KiB 0.5   16 KiB 1.1   256 KiB 1.2   1 MiB 0.8   4 MiB 1.6
//   4 ranks, all-to-all   256 B 1.6   4 KiB 1.8   64 KiB 1.5   1 MiB 1.3   4 MiB 1.1
//            messages     256 B 1.1   4 KiB 3.2   64 KiB 2.9   1 MiB 1.7   4 MiB 1.6
constexpr bool gloo_gathers_at_once(int64_t ranks, int64_t bytes) {
  return bytes <= (ranks > 2 ? int64_t{4} << 10 : int64_t{4} << 20);
}

// Whether an all-reduce of `bytes` gathers everyone's whole terms, which each rank reduces: one step in the place of
// Gloo's 2 (n - 1).
//   2 ranks   256 B 6.9   4 KiB 9.7   64 KiB 3.0   256 KiB 2.9   1 MiB 1.2   4 MiB 0.6
//   4 ranks   256 B 2.0   4 KiB 2.4   64 KiB 2.5   256 KiB 2.1   1 MiB 1.3   4 MiB 0.4
constexpr bool gloo_reduces_at_once(int64_t ranks, int64_t bytes) {
  return ranks * bytes <= (ranks > 2 ? int64_t{4} << 20 : int64_t{2} << 20);
}

}  // namespace tessera

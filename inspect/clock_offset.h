#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

// Holds when one rank came to a barrier and left it, by its own clock.
struct BarrierTimes {
  int64_t enter_ns = 0;
  int64_t exit_ns = 0;
};

// Returns how far the clock of `other` is ahead of the clock of `first`, in nanoseconds, as well as their times at the
// same barriers tell. No rank leaves a barrier before every rank has come to it, which bounds the offset from both
// sides; the result is the value within all bounds that is nearest to 0.
//   first {enter 10, exit 20}, other {enter 112, exit 119}: it is between 92 and 109, so 92
// Where the bounds exclude each other, because a clock was set meanwhile, it is the middle between them.
int64_t clock_offset(const std::vector<BarrierTimes>& first, const std::vector<BarrierTimes>& other);

}  // namespace tessera

#pragma once

#include <functional>

#include <c10/core/Device.h>

#include "tessera/bench/measure.h"

namespace tessera::bench {

// Holds the microseconds of one call on both sides, and the rounds' ratios.
struct Compared {
  Figure ours, plain, ratio;
};

// Measures both sides in turn, `calls` calls and a wait for the device a round, after rounds that warm up.
Compared compare(c10::Device device, int rounds, int calls, const std::function<void()>& ours,
                 const std::function<void()>& plain);

}  // namespace tessera::bench

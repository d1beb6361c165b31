#pragma once

#include <vector>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Returns the sample and the same call with other numbers: of any sign and size, and small integers of which many are
// zero or equal. What holds for all of them is seldom a coincidence. It draws from the default generator; LibTorch may
// refuse some of the calls.
std::vector<Sample> variants(const Sample& sample);

}  // namespace tessera::testing

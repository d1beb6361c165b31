#pragma once

#include <vector>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// The sample, and the same call with other numbers: of any sign and size, and small whole ones, of which many are zero
// or equal. What holds for all of them is seldom a coincidence. Draws from the default generator; LibTorch may refuse
// some.
std::vector<Sample> variants(const Sample& sample);

}  // namespace tessera::testing

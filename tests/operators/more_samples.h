#pragma once

#include <vector>

#include "tessera/tests/ops_rules/sample.h"

namespace tessera::testing {

// Calls of operators that have no rule of their own: fused optimizers, lists; and some that only a hand can make arguments for.
std::vector<Sample> more_samples();

}  // namespace tessera::testing

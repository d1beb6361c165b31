#pragma once

#include <vector>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Calls of operators that have no rule of their own: fused optimizers, lists; and some that only a hand can make
// arguments for.
std::vector<Sample> more_samples();

// Calls of what models are made of: recurrent layers, norms, losses, embeddings, attention, signals, resampling,
// convolutions.
std::vector<Sample> model_samples();

// Calls of the steps of other operators and of their gradients, of products in dtypes of their own, of indexing.
std::vector<Sample> step_samples();

}  // namespace tessera::testing

#pragma once

#include <vector>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Returns calls of operators that have no rule of their own (fused optimizers, lists), and some whose arguments only a
// person can choose.
std::vector<Sample> more_samples();

// Returns calls of the operators that models consist of: recurrent layers, norms, losses, embeddings, attention,
// signals, resampling and convolutions.
std::vector<Sample> model_samples();

// Returns calls of the operators that other operators and their gradients run, of products in dtypes of their own, and
// of indexing.
std::vector<Sample> step_samples();

}  // namespace tessera::testing

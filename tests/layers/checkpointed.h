#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/layers/activation_checkpoint.h"

namespace tessera::testing {

// Computes a function with dropout of two plain leaves and a captured weight, with or without a checkpoint, and runs
// backward. Returns the two results, a draw after forward, the three gradients, and a draw after backward.
std::vector<at::Tensor> run_checkpointed(bool checkpointed, const CheckpointOptions& options = {});

}  // namespace tessera::testing

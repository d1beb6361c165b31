#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera {

// Compares this rank's piece with what `spec` says, over the whole mesh: sizes, dtype, and where the tensor is
// replicated the contents by a 64-bit hash. Runs two all_gathers per mesh dimension: of one integer per rank, then of 2
// + n, where n is the largest number of dimensions of a piece. Where something differs, every rank of the mesh throws
// the same std::invalid_argument, which names the ranks that differ.
void verify_local(const at::Tensor& local, const Spec& spec);

}  // namespace tessera

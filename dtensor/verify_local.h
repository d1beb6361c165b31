#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera {

// Compares this rank's piece with what `spec` says, over the whole mesh: sizes, dtype, and where the tensor is
// replicated the contents by a 64-bit hash. One all_gather a mesh dimension of 4 + ndim integers. Every rank of the
// mesh throws the same std::invalid_argument, naming the ranks that differ; none does when all is well.
void verify_local(const at::Tensor& local, const Spec& spec);

}  // namespace tessera

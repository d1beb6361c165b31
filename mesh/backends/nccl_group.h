#pragma once

#include "tessera/mesh/backends/backend_group.h"

namespace tessera {

// Says whether this is a build for CUDA tensors: --config=cuda.
bool built_with_nccl();

// Makes a group for CUDA tensors, collectively over its members. Throws what NCCL throws, and std::runtime_error in a
// build without NCCL or on a machine without a GPU.
BackendGroup make_nccl_group(const GroupRequest& request);

}  // namespace tessera

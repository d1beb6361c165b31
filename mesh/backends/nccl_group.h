#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/mesh/backends/backend_group.h"

namespace tessera {

// Says whether this is a build for CUDA tensors: --config=cuda.
bool built_with_nccl();

// Says whether the current stream of a GPU is being captured in a CUDA graph. False in a build without CUDA.
bool cuda_stream_is_captured(c10::Device device);

// Makes a group for CUDA tensors, collectively over its members. Throws what NCCL throws, and std::runtime_error in a
// build without NCCL or on a machine without a GPU.
BackendGroup make_nccl_group(const GroupRequest& request);
// Wraps a backend of NCCL that the caller has made, in any build. close() aborts what the GPU has not done yet, and
// returns within about four seconds.
BackendGroup wrap_nccl_group(c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/hookable.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// Is called for every module from the root ("") down, and converts the module's own parameters and buffers as it likes,
// with distribute_in_place. It must do the same on every rank; an exception in it fails the job (World::guard).
using PartitionFn = std::function<void(const std::string& path, torch::nn::Module& module, const DeviceMesh& mesh)>;

struct DistributeModuleOptions {
  // Is the global rank whose values count for the tensors that the partition function leaves plain, or kNoSource.
  int64_t src_rank = kMeshFirstRank;
  // These wrap the root's forward, which must then be a TESSERA_MODULE (hooks.h).
  Hookable::PreHook input_fn = {};
  Hookable::Hook output_fn = {};
};

// Distributes the parameters and buffers of `module` in place: `partition_fn` (which may be empty) converts what it
// wants, and every tensor that it leaves plain becomes Replicate. No contracts are set: use parallelize_module to say
// how activations are laid out.
// Communication: that of partition_fn, and one broadcast over all mesh dimensions for each tensor that it leaves. The
// modules must be the same on all ranks; unlike parallelize_module, this function does not compare them.
// Throws std::invalid_argument, before anything is converted, when input_fn or output_fn is given and the module is no
// TESSERA_MODULE.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PartitionFn& partition_fn = {},
                       const DistributeModuleOptions& options = {});

}  // namespace tessera

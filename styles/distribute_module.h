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

// Called for every module from the root ("") down; converts what it wants of the module's own parameters and buffers
// with distribute_in_place. Must do the same on every rank; an exception in it fails the job (World::guard).
using PartitionFn = std::function<void(const std::string& path, torch::nn::Module& module, const DeviceMesh& mesh)>;

struct DistributeModuleOptions {
  // The global rank whose values count, or kNoSource; for what the partition function leaves.
  int64_t src_rank = kMeshFirstRank;
  // Wrap the root's forward; it must then be a TESSERA_MODULE (hooks.h).
  Hookable::PreHook input_fn;
  Hookable::Hook output_fn;
};

// Distributes the parameters and buffers of `module` in place, as `partition_fn` says (it may be empty); what it leaves
// plain becomes Replicate. It leaves no contracts: parallelize_module is the way to say how activations lie.
// Communication: that of partition_fn, and one broadcast over all mesh dimensions for each tensor left. Modules must be
// alike on all ranks; unlike parallelize_module it does not compare them.
// Throws std::invalid_argument, before anything is converted, when input_fn or output_fn is given and the module has no
// hooks.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PartitionFn& partition_fn = {},
                       const DistributeModuleOptions& options = {});

}  // namespace tessera

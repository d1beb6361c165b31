#pragma once

#include <cstdint>

#include "tessera/mesh/world.h"

namespace tessera {

// Seeds every random operator and factory on DTensors of this world: the k-th of them after this call draws from a generator
// keyed by (seed, k, the rank's coordinate on the mesh dimensions that shard its result). So replicas agree, shards draw
// differently, and every rank must make the same calls in the same order. Without a call the seed is one constant.
// torch::manual_seed seeds plain tensors only. No communication.
void manual_seed(uint64_t seed, World& world);
// In the environment's world.
void manual_seed(uint64_t seed);

}  // namespace tessera

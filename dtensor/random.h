#pragma once

#include <cstdint>

#include "tessera/mesh/world.h"

namespace tessera {

// Seeds every random operator and factory on DTensors of this world. What the k-th of them after this call draws for an
// element depends only on (seed, k, the element's position in the global tensor): it is the same on any mesh and with
// any sharding, and the same on CPU and CUDA up to rounding. The numbers are not torch's. Every rank must make the same
// calls in the same order.
// This holds for uniform, normal, bernoulli, dropout, random (randint), exponential, log_normal, geometric and cauchy.
// Other operators (multinomial, randperm) run replicated, from a LibTorch generator whose seed is made of (seed, k). If
// the caller passes a generator, each call takes one number of 64 bits from it, in place of (seed, k).
// Without a call of manual_seed the seed is a constant. torch::manual_seed seeds plain tensors only.
// To save and restore the state, read and write World::random_state(): a recomputation in backward sets the state from
// before forward, runs forward again, and restores the state. Does not communicate.
void manual_seed(uint64_t seed, World& world);
// Does the same in the environment's world.
void manual_seed(uint64_t seed);

}  // namespace tessera

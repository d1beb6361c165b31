#pragma once

#include <cstdint>

#include "tessera/mesh/world.h"

namespace tessera {

// Seeds every random operator and factory on DTensors of this world. What the k-th of them after this call gives each
// element depends on (seed, k, the element's place in the global tensor) alone: the same on any mesh and however the
// tensor is sharded, and the same on CPU and CUDA but for rounding. They are not torch's numbers. Every rank must make
// the same calls in the same order. So draw uniform, normal, bernoulli, dropout, random (randint), exponential,
// log_normal, geometric and cauchy; other operators (multinomial, randperm) run replicated, from a generator of
// LibTorch's with a seed made of (seed, k). A caller's own generator gives one number of 64 bits a call, which stands
// for (seed, k). Without a call the seed is one constant. torch::manual_seed seeds plain tensors only.
// World::random_state() is read and written to save and restore: a recomputation in backward sets what it read before
// forward, runs forward again, and puts back what it found. No communication.
void manual_seed(uint64_t seed, World& world);
// In the environment's world.
void manual_seed(uint64_t seed);

}  // namespace tessera

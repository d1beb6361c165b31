#include "tessera/dtensor/random.h"

namespace tessera {

void manual_seed(uint64_t seed, World& world) { world.random_state() = {.seed = seed, .counter = 0}; }
void manual_seed(uint64_t seed) { manual_seed(seed, *World::from_environment()); }

}  // namespace tessera

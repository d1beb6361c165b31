#pragma once

#include "tessera/placement/placement.h"

// Gives the placements that most tests use names of one or two letters, which make tables readable.
namespace tessera::testing {

inline const Placement R = Replicate();
inline const Placement S0 = Shard(0);
inline const Placement S1 = Shard(1);
inline const Placement S2 = Shard(2);
inline const Placement P = Partial();

}  // namespace tessera::testing

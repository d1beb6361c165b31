#pragma once

#include <string>

#include "tessera/examples/train/options.h"

namespace train {

// Returns what a step of this run would hold and send: bytes per rank, and the collectives of rank 0. Computes one step
// in this process as rank 0 of a world whose collectives move nothing, so it needs no other rank and no data.
std::string dry_run(Options options);

}  // namespace train

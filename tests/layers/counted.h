#pragma once

#include <string>

#include "tessera/mesh/collectives/comm_counter.h"

namespace tessera::testing {

// Returns the number of collectives of each kind: "2 all_gather, 1 all_reduce"; "" for none.
std::string counted(const CommCounter& counter);

}  // namespace tessera::testing

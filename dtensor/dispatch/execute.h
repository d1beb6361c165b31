#pragma once

#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

// Runs `call` as `decision` says: redistributes, calls the operator on the pieces, wraps what comes. Leaves the results on the
// stack. An error that this rank alone may see is told to the world.
void execute(const Call& call, const Decision& decision);

}  // namespace tessera::dispatch

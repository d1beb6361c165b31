#pragma once

#include "tessera/dtensor/dispatch/call.h"

namespace tessera::dispatch {

// Throws std::invalid_argument for a call that no layout makes possible: a DTensor whose shape would change in place,
// or that would become sparse or leave its mesh's device, running statistics that are cut, a plain tensor that would be
// written, and draws into a pending reduction. Does not communicate, and throws on every rank alike.
void refuse_unsupported(const Call& call);

}  // namespace tessera::dispatch

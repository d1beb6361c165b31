#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

// While it lives, this thread's operators run below autograd and autocast, which have seen the call on DTensors: an
// operator that autocast does not know would else be cast on its pieces.
class BelowAutograd {
 private:
  const c10::impl::ExcludeDispatchKeyGuard guard_{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                  c10::autocast_dispatch_keyset};
};

// Runs `call` as `decision` says: redistributes, calls the operator on the pieces, wraps the results, and leaves them
// on the stack. An error that this rank alone may see fails the World.
void execute(const Call& call, const Decision& decision);

}  // namespace tessera::dispatch

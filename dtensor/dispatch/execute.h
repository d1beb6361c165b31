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

// Says whether the global tensor is row-major without gaps.
bool is_row_major(const Spec& spec);

// Returns `local` made dense, with its dimensions in the order in memory of the global tensor's; row-major if the
// global tensor is expanded.
at::Tensor as_dense(const at::Tensor& local, const Spec& spec);

// Gives a redistributed piece, which is row-major, the memory order of the global tensor. Otherwise the strides of
// results, and LibTorch's formulas that ask whether a matrix is transposed, would not match the piece.
at::Tensor in_memory_order(const at::Tensor& local, const Spec& spec);

}  // namespace tessera::dispatch

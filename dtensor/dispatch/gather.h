#pragma once

#include "tessera/dtensor/dispatch/call.h"

namespace tessera::dispatch {

// Parameters that are cut over data dimensions to spare memory (Contract::gathered) are gathered there for the call, below autograd:
// what autograd keeps for backward is the piece, and a formula that uses it comes by here again. Explicit communication: one all-gather
// a parameter and mesh dimension. Left as they lie are: what the call writes; a tensor whose result is a view or a copy of it; and
// parameters in a call whose tensors all lie alike, as those of an optimizer's step or of a function of the parameter alone.
void gather_parameters(Call& call);

}  // namespace tessera::dispatch

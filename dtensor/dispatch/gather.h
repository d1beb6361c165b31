#pragma once

#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

using Decide = c10::function_ref<DecisionPtr(const Call&)>;

// Decides a call by `decide`, after gathering the parameters that are also cut over data dimensions
// (Contract::gather_dims). They are gathered for this call only, below autograd: autograd saves the piece, and a
// backward formula that uses it is dispatched here again. Runs one all-gather per parameter and mesh dimension, as
// explicit communication. It does not gather what the call writes, nor a tensor whose result is a view or a copy of it.
// If the call then needs no communication, it does not gather
//   - parameters, where besides them the call has only numbers or tensors that do not change the layout: the result is
//     gathered where it is used, as parameters are (Call::contract_from_parameters);
//   - tensors of one shape and layout, as those of an optimizer's step.
DecisionPtr decide_gathered(Call& call, Decide decide);

// Does the same without communication, with stand-ins that hold no values; appends to `steps` what would be gathered.
DecisionPtr explain_gathered(Call& call, Decide decide, std::vector<std::string>& steps);

// Says whether a tensor is a Shard or Partial on a mesh dimension that its contract says to gather.
inline bool is_gathered(const detail::Meta& meta) {
  if (meta.contract == nullptr) return false;
  for (const int64_t mesh_dim : meta.contract->gather_dims) {
    if (!meta.spec->placements[static_cast<std::size_t>(mesh_dim)].is_replicate()) return true;
  }
  return false;
}

}  // namespace tessera::dispatch

#pragma once

#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

using Decide = c10::function_ref<DecisionPtr(const Call&)>;

// Decides a call by `decide`, where parameters that are cut over data dimensions to spare memory (Contract::gathered)
// are whole. They are gathered there for the call, below autograd: what autograd keeps for backward is the piece, and a
// formula that uses it comes by here again. Explicit communication: one all-gather a parameter and mesh dimension. Left
// as they lie are: what the call writes; a tensor whose result is a view or a copy of it; and, where the call then
// needs no communication,
//   - parameters alone, with numbers beside them: the result is gathered at its own use as they are (Call::derived);
//   - tensors that all lie alike, as those of an optimizer's step.
DecisionPtr decide_gathered(Call& call, Decide decide);

// The same without communication, by stand-ins that have no values; `steps` takes what would be gathered.
DecisionPtr explain_gathered(Call& call, Decide decide, std::vector<std::string>& steps);

// Whether a tensor lies in pieces, or in terms, over mesh dimensions that its contract says to gather.
inline bool is_gathered(const detail::Meta& meta) {
  if (meta.contract == nullptr) return false;
  for (const int64_t mesh_dim : meta.contract->gathered) {
    if (!meta.spec->placements[static_cast<std::size_t>(mesh_dim)].is_replicate()) return true;
  }
  return false;
}

}  // namespace tessera::dispatch

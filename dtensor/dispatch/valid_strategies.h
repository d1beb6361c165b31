#pragma once

#include <span>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/ops/rules/rule.h"

namespace tessera::dispatch {

// Says whether an argument names a dimension that the first tensor does not have.
bool names_missing_dim(const rules::OpCall& call);

// Drops the strategies of a rule that are right for the operator and wrong for this call:
//   - those that cut inputs of different sizes, where LibTorch has not checked the sizes (`checked` is false);
//   - those in which a plain 0-d tensor is a term or a piece, since it is the same on every rank;
//   - those with Partial inputs, where terms would not add up (see has_zero_or_nonfinite_number);
//   - those of an operator whose own kernel draws random numbers.
// `tensors` are the rule's inputs, as indexes in call.tensors, and `inputs` describes them.
void drop_invalid_strategies(rules::OpRule& rule, const Call& call, std::span<const std::size_t> tensors,
                             std::span<const rules::TensorInfo> inputs, bool checked);

}  // namespace tessera::dispatch

#pragma once

#include <string>
#include <vector>

#include "tessera/ops/rules/rule.h"
#include "tessera/tests/ops/rules/sample.h"

// Strategies that are missing: an operator that runs on the pieces of its tensors as they lie gives the pieces of its
// result, and yet its rule would communicate.
namespace tessera::testing {

// One call, with its values drawn several times.
using Draws = std::vector<Sample>;

// Tries every way in which the tensors of the call may lie on a mesh of one dimension: Replicate, Shard of each
// dimension, Partial by sum, avg, max and min (of one kind at once); runs the operator on the pieces; and looks for a
// layout of the results that gives what the whole call gives. That holds for every draw, the same with other numbers,
// and on two, three and four ranks; it is missing where rules::choose would communicate, or leave a result pending that
// need not be. Of strategies of which one does for the other's inputs, the one that does is told; and of the same for a
// sum and an average, the sum. Where tensors are many, at most two of them are pending, or cut unless their sizes
// agree.
std::vector<rules::Strategy> missing_strategies(const Draws& draws);

// "S(0), R -> P(sum)"
std::string to_string(const rules::Strategy& strategy);

}  // namespace tessera::testing

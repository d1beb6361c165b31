#pragma once

#include <string>
#include <vector>

#include "tessera/ops/rules/rule.h"
#include "tessera/tests/ops/rules/sample.h"

// A strategy is missing if running the operator on the pieces of its tensors as they are would give the pieces of its
// result, and yet its rule would communicate.
namespace tessera::testing {

// Holds one call, whose values are drawn several times.
using Draws = std::vector<Sample>;

// Tries the layouts that the call's tensors may have on a 1-D mesh: Replicate, Shard of each dimension, Partial by sum,
// avg, max and min (one kind at a time). For each it runs the operator on the pieces and looks for a layout of the
// results that gives what the whole call gives, for every draw, the same with other numbers, and on two, three and four
// ranks. The strategy is missing where rules::choose would communicate, or would leave a result pending that need not
// be. Of two strategies of which one serves the other's inputs too, that one is returned; of the same for a sum and an
// average, the sum. If there are many tensors, at most two of them are pending, and at most two are cut unless their
// sizes agree.
std::vector<rules::Strategy> missing_strategies(const Draws& draws);

// "S(0), R -> P(sum)"
std::string to_string(const rules::Strategy& strategy);

}  // namespace tessera::testing

#pragma once

#include <string>
#include <vector>

#include <ATen/core/stack.h>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Holds what came of running the strategies that an operator's rule offers.
struct StrategyRuns {
  int count = 0;
  std::vector<std::string> wrong;  // what differs, by strategy and number of ranks
};

// Runs each strategy of the sample's rule as 2, 3 and 4 ranks would, in one process: cuts the tensors, or divides them
// into terms, runs the operator on each rank's pieces, joins the results, and compares them with those of the whole
// tensors. Leaves out what no call can ask for: terms of a dtype that has none, and an operator in place that would
// change the layout of what it writes.
StrategyRuns run_strategies(const Prepared& sample);

// Does that for an operator and its arguments, those left out being the schema's defaults:
//   check_rule("mylib::scale_rows", {torch::randn({6, 3}), torch::randn({6})});
// Give tensors of several sizes and values that differ from each other, and call it for each way in which the rule
// decides. Throws std::runtime_error, which lists what is wrong, where a result is, and where the rule offers no
// strategy for these arguments; std::logic_error where the operator has no rule.
void check_rule(const std::string& op, const torch::jit::Stack& arguments);

}  // namespace tessera::testing

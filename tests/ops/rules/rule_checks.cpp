#include "tessera/tests/ops/rules/rule_checks.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/placement/reduction.h"
#include "tessera/tests/ops/rules/pieces.h"
#include "tessera/tests/ops/rules/simulate.h"

namespace tessera::testing {
namespace {

using rules::OpRule;
using rules::Strategy;

Layouts layouts_of(const OpRule& rule, const Strategy& strategy) {
  Layouts out{.inputs = {}, .outputs = {}, .kernel = strategy.kernel.empty() ? rule.kernel : strategy.kernel};
  for (const Placement& p : strategy.inputs) out.inputs.push_back({p});
  for (const Placement& p : strategy.outputs) out.outputs.push_back({p});
  return out;
}

std::string text_of(const Strategy& strategy) {
  const std::string by = strategy.kernel.empty() ? "" : fmt::format(" by {}", strategy.kernel);
  return fmt::format("{} -> {}{}", to_string(strategy.inputs), to_string(strategy.outputs), by);
}

// Says whether tensors of a dtype can have this pending reduction, which may be a user's.
bool can_be_pending(at::ScalarType dtype, const Placement& partial) {
  if (const auto op = plain_op(partial)) return can_be_partial(dtype, *op);
  try {
    partial.reduction().check(dtype, "check_rule");
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

bool can_be_asked_for(const Prepared& sample, const Strategy& strategy) {
  for (std::size_t j = 0; j < strategy.inputs.size(); ++j) {
    const at::Tensor& t = sample.tensors()[j];
    const Placement& p = strategy.inputs[j];
    if (t.defined() && p.is_partial() && !can_be_pending(t.scalar_type(), p)) return false;
  }
  return !sample.in_place() || strategy.inputs[0] == strategy.outputs[0];
}

}  // namespace

StrategyRuns run_strategies(const Prepared& sample) {
  StrategyRuns out;
  const OpRule& rule = sample.rule();
  for (const Strategy& strategy : rule.strategies) {
    if (strategy.inputs.size() != sample.tensors().size() || strategy.outputs.size() != sample.results().size()) {
      out.wrong.push_back(fmt::format("{}: it has {} inputs and {} outputs, the operator {} and {}", text_of(strategy),
                                      strategy.inputs.size(), strategy.outputs.size(), sample.tensors().size(),
                                      sample.results().size()));
      continue;
    }
    if (!can_be_asked_for(sample, strategy)) continue;
    const Layouts layouts = layouts_of(rule, strategy);
    for (const int64_t n : {2, 3, 4}) {
      const std::vector<int64_t> mesh = {n};
      if (rule.valid && !rule.valid(layouts.inputs, layouts.outputs, mesh)) continue;
      ++out.count;
      const std::string wrong = simulate(sample, layouts, mesh);
      if (!wrong.empty()) out.wrong.push_back(fmt::format("{}, {} ranks: {}", text_of(strategy), n, wrong));
    }
  }
  return out;
}

void check_rule(const std::string& op, const torch::jit::Stack& arguments) {
  const StrategyRuns runs = run_strategies(Prepared({.op = op, .args = arguments}));
  if (!runs.wrong.empty()) {
    throw std::runtime_error(fmt::format("check_rule: {}: {} of {} runs differ from the whole tensors:\n{}", op,
                                         runs.wrong.size(), runs.count, fmt::join(runs.wrong, "\n")));
  }
  if (runs.count == 0) {
    throw std::runtime_error(
        fmt::format("check_rule: {}: the rule offers no strategy for these arguments, so nothing was checked", op));
  }
}

}  // namespace tessera::testing

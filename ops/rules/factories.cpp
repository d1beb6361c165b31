#include "tessera/ops/rules/labels.h"

// This file has the rules of operators that use a tensor's sizes and not its values.
namespace tessera::rules {
namespace {

Strategy from_first(const OpCall& call, Placement input, Placement output) {
  Strategy strategy{.inputs = Placements(call.inputs.size(), Replicate()), .outputs = {output}};
  strategy.inputs[0] = input;
  return strategy;
}

// The result is sharded as the input is if it has the `same` sizes; it is replicated if it has others or the input is
// pending.
OpRule filled(const OpCall& call, bool same) {
  OpRule rule;
  for (int64_t d = 0; d < call.inputs.at(0).ndim(); ++d) {
    rule.strategies.push_back(from_first(call, Shard(d), same ? Shard(d) : Replicate()));
  }
  for (const ReduceOp op : kPlainReductions) rule.strategies.push_back(from_first(call, Partial(op), Replicate()));
  return rule;
}

OpRule of_sizes(const OpCall& call) {
  OpRule rule = filled(call, call.arg("size").toIntVector() == call.inputs.at(0).sizes);
  rule.size_arg = static_cast<int>(call.arg_index("size"));
  if (call.has_arg("stride")) rule.stride_arg = static_cast<int>(call.arg_index("stride"));
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"zeros_like", sizes_of_first}, {"ones_like", sizes_of_first}, {"full_like", sizes_of_first},
    {"empty_like", sizes_of_first}, {"new_zeros", of_sizes},       {"new_ones", of_sizes},
    {"new_full", of_sizes},         {"new_empty", of_sizes},       {"new_empty_strided", of_sizes},
};

}  // namespace

OpRule sizes_of_first(const OpCall& call) { return filled(call, true); }

std::span<const RuleEntry> factory_rules() { return kTable; }

}  // namespace tessera::rules

#include "tessera/ops/rules/labels.h"

// This file has the rules of operators that use a tensor's sizes and not its values.
namespace tessera::rules {
namespace {

Strategy from_first(const OpCall& call, Placement input, Placement output) {
  Strategy strategy{.inputs = Placements(call.inputs.size(), Replicate()), .outputs = {output}};
  strategy.inputs[0] = input;
  return strategy;
}

// The result has `sizes`. It is cut as the input is along a dimension up to which both have the same sizes, such as
// that of the batch; it is replicated if they differ before, or if the input is pending.
OpRule filled(const OpCall& call, const std::vector<int64_t>& sizes) {
  const std::vector<int64_t>& from = call.inputs.at(0).sizes;
  OpRule rule;
  bool same = sizes.size() == from.size();
  for (std::size_t d = 0; d < from.size(); ++d) {
    const Placement cut = Shard(static_cast<int64_t>(d));
    same = same && sizes[d] == from[d];
    rule.strategies.push_back(from_first(call, cut, same ? cut : Placement(Replicate())));
  }
  for (const ReduceOp op : kPlainReductions) rule.strategies.push_back(from_first(call, Partial(op), Replicate()));
  return rule;
}

OpRule of_sizes(const OpCall& call) {
  OpRule rule = filled(call, call.arg("size").toIntVector());
  rule.size_arg = static_cast<int>(call.arg_index("size"));
  if (call.has_arg("stride")) rule.stride_arg = static_cast<int>(call.arg_index("stride"));
  return rule;
}

// The result's values are undefined, and autograd copies a gradient into it whose strides are not the parameter's. A
// result that is pending as the input is takes that copy without communication.
OpRule new_empty_strided(const OpCall& call) {
  OpRule rule = of_sizes(call);
  const TensorInfo& from = call.inputs.at(0);
  const bool is_alike =
      !call.outputs.empty() && call.outputs[0].dtype == from.dtype && call.arg("size").toIntVector() == from.sizes;
  if (!is_alike) return rule;
  for (Strategy& strategy : rule.strategies) {
    if (strategy.inputs[0].is_partial()) strategy.outputs[0] = strategy.inputs[0];
  }
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"zeros_like", sizes_of_first}, {"ones_like", sizes_of_first}, {"full_like", sizes_of_first},
    {"empty_like", sizes_of_first}, {"new_zeros", of_sizes},       {"new_ones", of_sizes},
    {"new_full", of_sizes},         {"new_empty", of_sizes},       {"new_empty_strided", new_empty_strided},
};

}  // namespace

OpRule sizes_of_first(const OpCall& call) { return filled(call, call.inputs.at(0).sizes); }

std::span<const RuleEntry> factory_rules() { return kTable; }

}  // namespace tessera::rules

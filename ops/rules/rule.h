#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include "tessera/ops/rules/halos.h"
#include "tessera/ops/rules/strategy.h"
#include "tessera/placement/placement.h"

namespace tessera::rules {

// A tensor argument or result as rules see it: global, without data.
struct TensorInfo {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool defined = true;

  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
};

// One call of an operator. Tensor lists are flattened into `inputs`; an absent optional tensor is there, undefined.
struct OpCall {
  const c10::FunctionSchema& schema;
  std::span<const c10::IValue> args;
  std::vector<TensorInfo> inputs;
  std::vector<TensorInfo> outputs;       // flattened; empty when they could not be found beforehand
  std::vector<std::size_t> first_input;  // for each schema argument, where its tensors begin in `inputs`

  std::size_t arg_index(std::string_view name) const;  // throws std::logic_error on a name that the schema lacks
  bool has_arg(std::string_view name) const;
  const c10::IValue& arg(std::string_view name) const { return args[arg_index(name)]; }
  // The dimensions in an int or int-list argument, counted from the front of a tensor of `ndim`; empty for none.
  std::vector<int64_t> dims(std::string_view name, int64_t ndim) const;
  int64_t dim(std::string_view name, int64_t ndim) const;
};

// What an operator may do on ONE mesh dimension. Replicating everything is always possible and comes first.
struct OpRule {
  std::vector<Strategy> strategies;
  // No rule for these arguments: replicated, and counted as such.
  bool declines = false;
  // The local kernel where the strategies chosen name none, replication included.
  std::string_view kernel = {};
  // The argument that holds the sizes of the result, which the local call gets as the local ones; -1 for none.
  int size_arg = -1;
  // The argument that holds the strides of the result: the local call gets dense ones in the same memory order; -1 for
  // none.
  int stride_arg = -1;
  // Where the results lie when every input stays where it is, for views of dimensions that are cut; nullopt where they
  // could not. Asked before the strategies. `keep_kernel` then computes the pieces; "" for the operator itself.
  std::function<std::optional<std::vector<Placements>>(const std::vector<Placements>& inputs,
                                                       std::span<const int64_t> mesh_shape)>
      keep = {};
  std::string_view keep_kernel = {};
  // What ranks exchange before the kernel runs, where a strategy cuts these dimensions.
  std::optional<Halos> halos = {};
  // Results that cannot be found by running the operator on meta tensors.
  std::vector<TensorInfo> outputs;
  // Whether placements chosen for the first mesh dimensions go together; empty for always. For views, where a split of
  // one dimension must be a split of the other.
  std::function<bool(const std::vector<Placements>& inputs, const std::vector<Placements>& outputs,
                     std::span<const int64_t> mesh_shape)>
      valid;
};

inline OpRule no_rule() { return {.strategies = {}, .declines = true}; }

// Factors name what the dimensions of an operator's tensors are, one letter a dimension: mm is (mk)(kn)->(mn). The same
// letter is the same factor; '-' is a dimension that must stay whole.
using Labels = std::string;

// For each factor, in order of appearance: it sharded wherever it stands; a result without it is Partial(op)
// ("summed"). `unsummable` lists factors that may be sharded only where every result has them.
std::vector<Strategy> shard_factors(const std::vector<Labels>& inputs, const std::vector<Labels>& outputs,
                                    ReduceOp op = ReduceOp::kSum, std::string_view unsummable = {});

// The inputs of `group` Partial(op) together, the others replicated: every result is Partial(op). For what is linear in
// them.
Strategy pass_partial(std::size_t num_inputs, std::size_t num_outputs, const std::vector<std::size_t>& group,
                      ReduceOp op);

// pass_partial for sum and avg of each group.
void add_linear(OpRule& rule, std::size_t num_inputs, std::size_t num_outputs,
                const std::vector<std::vector<std::size_t>>& groups);
// pass_partial of input 0 for every reduction: for what only moves elements.
void add_movement(OpRule& rule, std::size_t num_inputs, std::size_t num_outputs);

// `count` letters, different from one another: "abc...".
Labels letters(std::size_t count, char first = 'a');

using RuleFn = OpRule (*)(const OpCall&);

// The rule of an operator by its base name without namespace's "aten::" and without the trailing '_' of an in-place one
// ("add" stands for add.Tensor, add_.Scalar, add.out); nullptr when there is none.
RuleFn find_rule(std::string_view op_name);
// A rule for a user's operator by namespace and name, without overload: "mylib::scale". It replaces one that is there.
// Every rank registers it before the operator's first use on a DTensor: decisions are kept (clear_dispatch_cache in
// dtensor/dispatch/dispatcher.h). The results' shapes come from a Meta kernel, else from OpRule::outputs; with neither
// the rule is not used. Placements count dimensions from 0 up; each Strategy has a placement for every entry of
// OpCall::inputs and every result. Throws std::invalid_argument on a null rule, and on a name with an overload or
// without a namespace.
void register_rule(const std::string& op_name, RuleFn rule);

// The key of `find_rule` for an operator's full name.
std::string rule_key(const std::string& op_name);

// For the tables of the families.
struct RuleEntry {
  std::string_view name;
  RuleFn rule;
};
std::span<const RuleEntry> pointwise_rules();
std::span<const RuleEntry> view_rules();
std::span<const RuleEntry> join_rules();
std::span<const RuleEntry> indexing_rules();
std::span<const RuleEntry> reduction_rules();
std::span<const RuleEntry> matmul_rules();
std::span<const RuleEntry> nn_rules();
std::span<const RuleEntry> convolution_rules();
std::span<const RuleEntry> pooling_rules();
std::span<const RuleEntry> norm_rules();
std::span<const RuleEntry> factory_rules();
std::span<const RuleEntry> random_rules();
std::span<const RuleEntry> batched_rules();

}  // namespace tessera::rules

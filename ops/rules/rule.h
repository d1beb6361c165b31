#pragma once

#include <atomic>
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

// Describes a tensor argument or result as rules see it: its global sizes and dtype, without data.
struct TensorInfo {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool defined = true;

  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
};

// Describes one call of an operator. Tensor lists are flattened into `inputs`; an absent optional tensor is an
// undefined entry.
struct OpCall {
  const c10::FunctionSchema& schema;
  std::span<const c10::IValue> args;
  std::vector<TensorInfo> inputs;
  std::vector<TensorInfo> outputs;       // flattened; empty when they could not be determined beforehand
  std::vector<std::size_t> first_input;  // for each schema argument, the index of its first tensor in `inputs`
  c10::DeviceType device = c10::DeviceType::CPU;

  std::size_t arg_index(std::string_view name) const;  // throws std::logic_error if the schema has no such argument
  bool has_arg(std::string_view name) const;
  const c10::IValue& arg(std::string_view name) const { return args[arg_index(name)]; }
  // Returns the dimensions in an int or int-list argument, counted from the front of a tensor of `ndim` dimensions;
  // empty if the argument is None.
  std::vector<int64_t> dims(std::string_view name, int64_t ndim) const;
  int64_t dim(std::string_view name, int64_t ndim) const;
};

// Holds what a rule offers on ONE mesh dimension. Replicating everything is always possible and is considered first.
struct OpRule {
  std::vector<Strategy> strategies;
  // There is no rule for these arguments: the operator runs replicated and is counted as one without a rule.
  bool declines = false;
  // Names the local kernel to use when the chosen strategies name none, even if everything is replicated.
  std::string_view kernel = {};
  // Is the index of the argument that holds the result's sizes, which the local call gets as local sizes; -1 for none.
  int size_arg = -1;
  // Is the index of the argument that holds the result's strides. The local call gets dense strides in the same memory
  // order; -1 for none.
  int stride_arg = -1;
  // For views of dimensions that are cut: returns the results' placements for these input placements, or nullopt if the
  // results have no placements then. choose() calls it unless the strategies cost nothing, and keeps the inputs so if
  // that is cheaper. `keep_kernel` then computes the pieces; "" means the operator itself.
  std::function<std::optional<std::vector<Placements>>(const std::vector<Placements>& inputs,
                                                       std::span<const int64_t> mesh_shape)>
      outputs_for = {};
  std::string_view keep_kernel = {};
  // Says which rows ranks exchange before the kernel runs, if a strategy cuts these dimensions.
  std::optional<Halos> halos = {};
  // Lists the results, where running the operator on meta tensors cannot determine them.
  std::vector<TensorInfo> outputs = {};
  // Returns whether the placements chosen for the first mesh dimensions are possible together; if empty, they always
  // are. Views need it, since a cut of one dimension must be a cut of the other.
  std::function<bool(const std::vector<Placements>& inputs, const std::vector<Placements>& outputs,
                     std::span<const int64_t> mesh_shape)>
      valid = {};
};

inline OpRule no_rule() { return {.strategies = {}, .declines = true}; }

// Labels name an operator's tensor dimensions, one letter (factor) per dimension: mm is (mk)(kn)->(mn). The same letter
// stands for the same factor; '-' marks a dimension that must not be cut.
using Labels = std::string;

// Returns one strategy per factor, in order of appearance: every tensor that has the factor is sharded along that
// dimension, and a result without it is Partial(op): the factor is reduced. Factors in `unsummable` may be sharded only
// if every result has them.
std::vector<Strategy> shard_factors(const std::vector<Labels>& inputs, const std::vector<Labels>& outputs,
                                    ReduceOp op = ReduceOp::kSum, std::string_view unsummable = {});

// Returns the strategy in which the inputs of `group` are Partial(op) together, the others are replicated and every
// result is Partial(op). It is for operators that are linear in these inputs.
Strategy pass_partial(std::size_t num_inputs, std::size_t num_outputs, const std::vector<std::size_t>& group,
                      ReduceOp op);

// Adds pass_partial for sum and avg for each group.
void add_linear(OpRule& rule, std::size_t num_inputs, std::size_t num_outputs,
                const std::vector<std::vector<std::size_t>>& groups);
// Adds pass_partial of input 0 for every plain reduction (kPlainReductions); norms and users' reductions are done
// first. It is for operators that only move elements.
void add_movement(OpRule& rule, std::size_t num_inputs, std::size_t num_outputs);

// Returns `count` different letters: "abc...".
Labels letters(std::size_t count, char first = 'a');

using RuleFn = OpRule (*)(const OpCall&);

// Returns the rule of an operator, or nullptr if there is none. The name is the operator's base name without "aten::"
// and without the trailing '_' of an in-place operator: "add" stands for add.Tensor, add_.Scalar and add.out.
RuleFn find_rule(std::string_view op_name);
// Registers a rule for an operator by namespace and name, without overload: "mylib::scale". It replaces an earlier one,
// also that of an operator of LibTorch's ("aten::mul"). Every rank must call it before the operator's first use on a
// DTensor, since decisions are cached (clear_dispatch_cache in dtensor/dispatch/dispatcher.h): for each layout, shape,
// dtype and option, and for each value of a number. The results' shapes are taken from a Meta kernel, else from
// OpRule::outputs; if there is neither, the rule is not used. In the placements dimensions count from 0, and each
// Strategy has one placement for every entry of OpCall::inputs and for every result. Throws std::invalid_argument on a
// null rule, on a name with an overload or without a namespace, and where LibTorch would run the operator's kernel
// itself rather than ask for a rule: one for all devices, as m.def(schema, function) registers it, and as LibTorch's
// matmul has. Rules of operators on lists (_foreach_*) and of those with a decomposition (local_kernel.h) may not be
// asked either.
void register_rule(const std::string& op_name, RuleFn rule);
// Is true once register_rule has replaced the rule of one of LibTorch's operators. It is read before is_replaced, which
// takes a lock.
inline std::atomic<bool> any_replaced = false;
// Says whether register_rule has replaced the rule of LibTorch's operator of this key.
bool is_replaced(std::string_view key);

// Throws std::logic_error unless the strategy has a placement for each of `inputs` inputs and `outputs` results. `rule`
// names the rule, as in "mylib::scale: its sharding rule".
void check_counts(const Strategy& strategy, std::size_t inputs, std::size_t outputs, std::string_view rule);
// Throws std::logic_error unless each strategy passes check_counts and cuts dimensions that the tensors have. `op`
// names the operator.
void check_strategies(const OpRule& rule, const std::vector<TensorInfo>& inputs, const std::vector<TensorInfo>& outputs,
                      std::string_view op);

// Returns the name under which find_rule looks up an operator, from its full name.
std::string rule_key(const std::string& op_name);

// Is an entry in the table of a family of rules.
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

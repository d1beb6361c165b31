#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "tessera/ops/rules/rule.h"

// Declares helpers that several families of rules use.
namespace tessera::rules {

// Returns the labels of a tensor of `sizes` that broadcasts against a tensor of sizes `whole` with labels `labels`:
// right-aligned, with '-' where the sizes differ.
//   sizes (4, 1), whole (3, 4, 5) "abc" -> "b-"
Labels broadcast_labels(const std::vector<int64_t>& sizes, const std::vector<int64_t>& whole, const Labels& labels);

// Returns the sizes to which the inputs broadcast. Undefined inputs are ignored.
std::vector<int64_t> broadcast_sizes(const std::vector<TensorInfo>& inputs);

// Returns whether a tensor of `sizes` broadcasts to `whole`; an undefined one does. LibTorch refuses one that does not,
// but only where its kernel sees whole tensors: a dimension of size 5 fits a piece of one of size 10.
bool broadcasts(const TensorInfo& input, const std::vector<int64_t>& whole);

// Returns the labels with '-' at `dims`. Dimensions out of range are ignored, so that dim 0 is allowed for a tensor of
// no dimensions.
Labels with_whole(Labels labels, std::span<const int64_t> dims);
// Returns the labels without those at `dims`.
Labels without(const Labels& labels, std::span<const int64_t> dims);

// Returns whether terms of a sum may be converted from dtype `from` to `to` before they are reduced. Conversions to or
// from integers are not allowed, since integers overflow at other values, nor is bool as a source, since a sum of bools
// counts. Conversions between floating dtypes are: rounding each term may change the sum, which a caller who asks for a
// narrower dtype accepts. But none is to float16 or float8 from another one, or from float64 to one of fewer bits:
// terms of a small sum might become infinite there, and add up to NaN.
bool converts_termwise(at::ScalarType from, at::ScalarType to);

// Calls add_linear for the groups whose inputs can all be converted term by term to the first result's dtype.
void add_linear_where_exact(OpRule& rule, const OpCall& call, const std::vector<std::vector<std::size_t>>& groups);

// Returns the rule of an operator that computes each result element from one element of every (broadcast) input. It
// assumes nothing else, so pending inputs are reduced first.
OpRule plain(const OpCall& call);

// Returns the rule of an operator that uses its first input's sizes and not its values. The result is sharded as that
// input is, and replicated where the input is pending.
OpRule sizes_of_first(const OpCall& call);

Labels labels_of(const TensorInfo& info);  // one letter per dimension

// Returns the rule of an operator that only moves elements. Every result has the labels `output`.
OpRule moved(const OpCall& call, const std::vector<Labels>& inputs, const Labels& output);
// Returns the same where every result has the input's dimensions and those in `whole` are not cut.
OpRule whole_dims(const OpCall& call, const std::vector<int64_t>& whole);

// Adds strategies in which all inputs are Partial by the same reduction, if they and the results have one dtype. It is
// for operators that take each result element from one of the inputs.
void add_joint(OpRule& rule, const OpCall& call);

// Adds strategies in which input 0 is pending while `value` replaces some of its elements: one for each reduction whose
// result is `value` when every term is `value`.
void add_filled(OpRule& rule, const OpCall& call, const at::Scalar& value);

// Returns whether every rank keeps the same element where a scatter writes several to one position. On a GPU the order
// is not defined, and on the CPU threads decide it in index_copy and index_put; terms of different elements would then
// be reduced together.
bool writes_in_order(const OpCall& call);

// Returns the number of dimensions of input 0.
inline int64_t ndim(const OpCall& call) { return call.inputs.at(0).ndim(); }

// Returns the entry for dimension d of a list with one number per dimension, one number for all, or none, which means
// `otherwise`, as does an argument that the operator does not have.
int64_t at_dim(const OpCall& call, std::string_view name, std::size_t d, int64_t otherwise = 1);

// Returns the rule of an operator that works along its dimension `dim` of all its tensors, which is cut in none. The
// results may have another length there.
OpRule along_dim(const OpCall& call);

// Returns the gradients of a backward operator; those that its `output_mask` does not ask for become undefined.
std::vector<TensorInfo> asked_for(const OpCall& call, std::vector<TensorInfo> gradients);

// Returns how many results the call has. A list counts as one if the results are not known.
std::size_t num_outputs(const OpCall& call);

}  // namespace tessera::rules

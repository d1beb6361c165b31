#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "tessera/ops/rules/rule.h"

// What the families of rules share.
namespace tessera::rules {

// The labels of a tensor of `sizes` that broadcasts against one of `whole` labelled `labels`: right-aligned, '-' where
// the sizes differ.
//   sizes (4, 1), whole (3, 4, 5) "abc" -> "b-"
Labels broadcast_labels(const std::vector<int64_t>& sizes, const std::vector<int64_t>& whole, const Labels& labels);

// What the inputs broadcast to; undefined ones are left out.
std::vector<int64_t> broadcast_sizes(const std::vector<TensorInfo>& inputs);

// The labels with '-' at `dims`; dimensions outside are passed over, so that a tensor of no dimensions may have "dim
// 0".
Labels with_whole(Labels labels, std::span<const int64_t> dims);
// The labels without those at `dims`.
Labels without(const Labels& labels, std::span<const int64_t> dims);

// Whether terms of `from` may be reduced after they were converted to `to`: integers would overflow elsewhere, bool
// counts. Terms that are rounded may be off by more than their sum: who asks for a narrower type gets what travels in
// it.
bool converts_termwise(at::ScalarType from, at::ScalarType to);

// add_linear of the groups whose inputs all convert termwise to the first result's type.
void add_linear_where_exact(OpRule& rule, const OpCall& call, const std::vector<std::vector<std::size_t>>& groups);

// What computes each element of the result from one element of every (broadcast) input, in no other way known.
OpRule plain(const OpCall& call);

// What takes the sizes of its first input and not its values: sharded as that is; whole where it is a term.
OpRule sizes_of_first(const OpCall& call);

Labels labels_of(const TensorInfo& info);  // a letter a dimension

// What only moves elements, in factors; every result has the labels `output`.
OpRule moved(const OpCall& call, const std::vector<Labels>& inputs, const Labels& output);
// The same where every result has the input's dimensions, those in `whole` whole.
OpRule whole_dims(const OpCall& call, const std::vector<int64_t>& whole);

// Every input pending together, by any reduction, where all have one type: for what takes each element from one of
// them.
void add_joint(OpRule& rule, const OpCall& call);

// Input 0 pending where `value` takes the place of some of its elements: by every reduction that makes the value of
// terms that all are.
void add_filled(OpRule& rule, const OpCall& call, const at::Scalar& value);

// Whether the operator writes the same of several elements for one place on every rank: on a GPU their order is left
// open, and terms of different ones would meet.
bool writes_in_order(const OpCall& call);

// The gradients of a backward, those that its `output_mask` does not ask for undefined.
std::vector<TensorInfo> asked_for(const OpCall& call, std::vector<TensorInfo> gradients);

// How many results the call has; a list counts as one where they are not known.
std::size_t num_outputs(const OpCall& call);

}  // namespace tessera::rules

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "tessera/ops/rules/labels.h"

// This file has the rules of operators that read or write elements by their indices. Where a mesh dimension cuts an
// indexed dimension, its ranks have the same indices, and a kernel reads, or writes, those elements that the rank
// holds; what is read are terms, since one rank has each element. The other dimensions may be cut too. Where the
// operator adds what it writes, pieces of the indices give terms of the result.
namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

// ---- one dimension; I labels the elements of the index

// Holds the labels of two tensors along the indexed dimension: '-' in the one, I in the other.
struct Along {
  Labels whole;
  Labels chosen;
};

Along along(const Labels& labels, std::size_t dim) {
  Along out{.whole = labels, .chosen = labels};
  out.whole[dim] = '-';
  out.chosen[dim] = 'I';
  return out;
}

std::size_t dim_of(const OpCall& call) { return static_cast<std::size_t>(call.dim("dim", ndim(call))); }

// A sum of bools cannot be pending.
bool adds_exactly(const OpCall& call, const TensorInfo& source) {
  return source.dtype == call.inputs.at(0).dtype && source.dtype != at::kBool;
}

// Where pieces of the index write terms, self must be a term too.
void add_up(OpRule& rule, const OpCall& call, std::size_t source) {
  for (Strategy& strategy : rule.strategies) {
    if (strategy.outputs[0].is_partial()) strategy.inputs[0] = strategy.outputs[0];
  }
  add_linear(rule, call.inputs.size(), 1, {{0, source}});
}

// Elements of self are replaced by those of the source: both may be pending by the same reduction.
void replace(OpRule& rule, const OpCall& call, std::size_t source) {
  if (call.inputs.at(source).dtype != call.inputs[0].dtype) return;
  for (const ReduceOp op : kPlainReductions)
    rule.strategies.push_back(pass_partial(call.inputs.size(), 1, {0, source}, op));
}

// Adds the strategy in which dimension `dim` of self is cut and the other inputs are whole.
void cut_indexed(OpRule& rule, const OpCall& call, std::size_t dim, const Placement& result, std::string_view kernel) {
  if (call.inputs.at(0).sizes.at(dim) == 0) return;  // LibTorch refuses it, or nothing is indexed
  Strategy strategy{.inputs = Placements(call.inputs.size(), Replicate()), .outputs = {result}, .kernel = kernel};
  strategy.inputs[0] = Shard(static_cast<int64_t>(dim));
  rule.strategies.push_back(std::move(strategy));
}

// Says whether LibTorch's kernels fill and add numbers of this type.
bool is_summed(at::ScalarType type) {
  constexpr std::array kSummed = {at::kBool,  at::kByte,   at::kChar,         at::kShort,
                                  at::kInt,   at::kLong,   at::kHalf,         at::kBFloat16,
                                  at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
  return std::ranges::find(kSummed, type) != kSummed.end();
}

// Does so for what reads `sizes`. They must be few: to reduce terms takes twice as long as to gather as many elements.
void cut_read(OpRule& rule, const OpCall& call, std::size_t dim, const Sizes& sizes) {
  if (!is_summed(call.inputs.at(0).dtype)) return;
  if (2 * c10::multiply_integers(sizes) > c10::multiply_integers(call.inputs.at(0).sizes)) return;
  // A sum of bools is not defined; their maximum is true where any term is.
  const ReduceOp of_terms = call.inputs[0].dtype == at::kBool ? ReduceOp::kMax : ReduceOp::kSum;
  cut_indexed(rule, call, dim, Partial(of_terms), "elements");
}

// Says whether LibTorch takes these types. It looks at them where it writes: a rank without elements would not refuse.
bool writes_types(const OpCall& call) {
  if (call.has_arg("indices")) return true;  // see index_put
  if (call.inputs.at(1).dtype != at::kLong) return false;
  return call.inputs.size() < 3 || call.has_arg("value") || call.inputs[2].dtype == call.inputs[0].dtype;
}

// Does so for what adds to self, or replaces what is there.
void cut_written(OpRule& rule, const OpCall& call, std::size_t dim, bool adds) {
  if (!writes_types(call)) return;
  const bool adds_zeros = adds && is_summed(call.inputs.at(0).dtype);
  cut_indexed(rule, call, dim, Shard(static_cast<int64_t>(dim)), adds_zeros ? "elements_added" : "elements_written");
}

// (self, index)
OpRule index_select(const OpCall& call) {
  const Labels self = labels_of(call.inputs.at(0));
  if (self.empty() || call.inputs.at(1).ndim() != 1) return no_rule();
  const Along labels = along(self, dim_of(call));
  OpRule rule = moved(call, {labels.whole, "I"}, labels.chosen);
  rule.outputs = {call.inputs[0]};
  rule.outputs[0].sizes[dim_of(call)] = call.inputs[1].sizes[0];
  cut_read(rule, call, dim_of(call), rule.outputs[0].sizes);
  return rule;
}

// The arguments are (self, index, source). Index and source have one element per position along a dimension.
template <bool adds_up>
OpRule write_along(const OpCall& call) {
  const Labels all = labels_of(call.inputs.at(0));
  const TensorInfo& source = call.inputs.at(2);
  if (all.empty() || call.inputs[1].ndim() != 1 || source.ndim() != ndim(call)) return no_rule();
  const bool adds = adds_up && adds_exactly(call, source);
  Along labels = along(all, dim_of(call));
  if (!adds) labels.chosen = labels.whole;
  OpRule rule{.strategies = shard_factors({labels.whole, adds ? "I" : "-", labels.chosen}, {labels.whole})};
  rule.outputs = {call.inputs[0]};
  if (adds) add_up(rule, call, 2);
  cut_written(rule, call, dim_of(call), adds);
  return rule;
}

// The arguments are (self, index, value), the value being an input if it is a tensor.
OpRule index_fill(const OpCall& call) {
  const Labels self = labels_of(call.inputs.at(0));
  if (self.empty()) return no_rule();
  const Labels labels = along(self, dim_of(call)).whole;
  std::vector<Labels> inputs = {labels, Labels(call.inputs.at(1).sizes.size(), '-'), ""};
  inputs.resize(call.inputs.size());
  OpRule rule{.strategies = shard_factors(inputs, {labels})};
  rule.outputs = {call.inputs[0]};
  if (call.inputs.size() > 2) {
    replace(rule, call, 2);
  } else {
    add_filled(rule, call, call.arg("value").toScalar());
  }
  cut_written(rule, call, dim_of(call), /*adds=*/false);
  return rule;
}

// ---- gather and scatter: the index has as many dimensions as self. Outside `dim` it may be shorter; its elements then
// refer to the first ones of self.

// Returns self's labels, with '-' in the dimensions where another tensor has a different size.
std::optional<Labels> shared_labels(const OpCall& call) {
  Labels out = labels_of(call.inputs.at(0));
  if (out.empty()) return std::nullopt;
  for (const TensorInfo& input : call.inputs) {
    if (input.ndim() == 0) continue;  // a number
    if (input.ndim() != ndim(call)) return std::nullopt;
    for (std::size_t d = 0; d < out.size(); ++d) {
      if (input.sizes[d] != call.inputs[0].sizes[d]) out[d] = '-';
    }
  }
  return out;
}

// (self, index)
OpRule gather(const OpCall& call) {
  const auto shared = shared_labels(call);
  if (!shared || call.inputs.at(1).ndim() == 0) return no_rule();
  const Along labels = along(*shared, dim_of(call));
  OpRule rule = moved(call, {labels.whole, labels.chosen}, labels.chosen);
  cut_read(rule, call, dim_of(call), call.inputs[1].sizes);
  return rule;
}

// The arguments are (self, index, src), src being an input if it is a tensor. Returns the strategies that hold whatever
// is done with the elements that are written.
OpRule scatter_pieces(const OpCall& call) {
  const auto shared = shared_labels(call);
  if (!shared || call.inputs.at(1).ndim() == 0) return no_rule();
  const Labels labels = along(*shared, dim_of(call)).whole;
  std::vector<Labels> inputs = {labels, labels,
                                call.inputs.size() > 2 && call.inputs[2].ndim() > 0 ? labels : Labels()};
  inputs.resize(call.inputs.size());
  OpRule rule{.strategies = shard_factors(inputs, {labels})};
  rule.outputs = {call.inputs[0]};
  cut_written(rule, call, dim_of(call), /*adds=*/false);
  return rule;
}

// Replaces elements.
OpRule scatter(const OpCall& call) {
  OpRule rule = scatter_pieces(call);
  if (rule.declines) return rule;
  if (call.inputs.size() > 2) {
    if (writes_in_order(call)) replace(rule, call, 2);
  } else {
    add_filled(rule, call, call.arg("value").toScalar());
  }
  return rule;
}

// Returns the reduction by which a scatter combines what it writes with what is there; nullopt if it does not combine
// them, or not in the way that terms are reduced.
std::optional<ReduceOp> reduction_of(const OpCall& call) {
  if (!call.has_arg("reduce")) return ReduceOp::kSum;  // scatter_add
  const std::string& name = call.arg("reduce").toStringRef();
  if (call.has_arg("include_self") && !call.arg("include_self").toBool()) return std::nullopt;
  if (name == "sum" || name == "add") return ReduceOp::kSum;
  if (name == "amax") return ReduceOp::kMax;
  if (name == "amin") return ReduceOp::kMin;
  return std::nullopt;
}

// The arguments are (self, index, src). Pieces of the index give terms of a sum. They could give terms of an extremum
// too, but its gradient would cost more than that saves.
OpRule scatter_reduced(const OpCall& call) {
  const auto op = reduction_of(call);
  if (!op || call.inputs.size() < 3 || !adds_exactly(call, call.inputs[2])) return scatter_pieces(call);
  if (op != ReduceOp::kSum) {
    OpRule rule = scatter_pieces(call);
    if (rule.declines) return rule;
    rule.strategies.push_back(pass_partial(3, 1, {0, 2}, *op));
    return rule;
  }
  const auto shared = shared_labels(call);
  const TensorInfo& index = call.inputs[1];
  const TensorInfo& source = call.inputs[2];
  const std::size_t dim = dim_of(call);
  if (!shared || index.ndim() == 0 || source.ndim() == 0) return scatter_pieces(call);
  Along labels = along(*shared, dim);
  if (index.sizes[dim] != source.sizes[dim]) labels.chosen = labels.whole;
  OpRule rule{.strategies = shard_factors({labels.whole, labels.chosen, labels.chosen}, {labels.whole})};
  rule.outputs = {call.inputs[0]};
  add_up(rule, call, 2);
  cut_written(rule, call, dim, /*adds=*/true);
  return rule;
}

OpRule scatter_any(const OpCall& call) { return call.has_arg("reduce") ? scatter_reduced(call) : scatter(call); }

// ---- indices of the first dimensions, which broadcast together; an absent one leaves its dimension unchanged

constexpr std::size_t kMostPlaces = 26;

struct Indexed {
  std::vector<Labels> inputs;          // of self and of the indices
  Sizes sizes;                         // of the result
  Labels chosen;                       // labels of the result
  std::vector<std::size_t> dims = {};  // those of self that are indexed
};

bool is_mask(const TensorInfo& info) { return info.defined && (info.dtype == at::kBool || info.dtype == at::kByte); }

// Returns nullopt if the choice of elements depends on values (masks).
std::optional<Indexed> read_indices(const OpCall& call, std::size_t count) {
  const TensorInfo& self = call.inputs.at(0);
  const std::vector<TensorInfo> given(call.inputs.begin() + 1,
                                      call.inputs.begin() + 1 + static_cast<std::ptrdiff_t>(count));
  if (given.size() > self.sizes.size() || std::any_of(given.begin(), given.end(), is_mask)) return std::nullopt;
  const Sizes places = broadcast_sizes(given);
  if (!std::ranges::all_of(given, [&](const TensorInfo& info) { return broadcasts(info, places); }))
    return std::nullopt;
  const Labels factors = letters(places.size(), 'A');
  const Labels all = labels_of(self);
  Indexed out{.inputs = {all}, .sizes = {}, .chosen = {}};
  std::vector<std::size_t> indexed;
  for (std::size_t d = 0; d < given.size(); ++d) {
    out.inputs.push_back(given[d].defined ? broadcast_labels(given[d].sizes, places, factors) : Labels());
    if (given[d].defined) indexed.push_back(d);
  }
  if (indexed.empty()) return std::nullopt;
  // The indices' dimensions are where the indices are, or first if other dimensions lie between the indexed ones.
  const bool together = indexed.back() - indexed.front() + 1 == indexed.size();
  for (std::size_t d = 0; d <= all.size(); ++d) {
    if (d == (together ? indexed.front() : 0)) {
      out.chosen += factors;
      out.sizes.insert(out.sizes.end(), places.begin(), places.end());
    }
    if (d == all.size() || std::find(indexed.begin(), indexed.end(), d) != indexed.end()) continue;
    out.chosen += all[d];
    out.sizes.push_back(self.sizes[d]);
  }
  for (const std::size_t d : indexed) out.inputs[0][d] = '-';
  out.dims = std::move(indexed);
  return out;
}

// (self, indices)
OpRule index(const OpCall& call) {
  const auto labels = read_indices(call, call.inputs.size() - 1);
  if (!labels) return no_rule();
  OpRule rule = moved(call, labels->inputs, labels->chosen);
  rule.outputs = {{.sizes = labels->sizes, .dtype = call.inputs[0].dtype}};
  for (const std::size_t d : labels->dims) cut_read(rule, call, d, labels->sizes);
  return rule;
}

// A single value is written where one mask is true: masked_fill.
std::optional<Indexed> read_mask(const OpCall& call, std::size_t count) {
  const TensorInfo& self = call.inputs.at(0);
  const TensorInfo& mask = call.inputs.at(1);
  const TensorInfo& value = call.inputs.at(1 + count);
  const bool one = std::all_of(value.sizes.begin(), value.sizes.end(), [](int64_t size) { return size == 1; });
  if (count != 1 || !is_mask(mask) || !one || mask.ndim() > self.ndim()) return std::nullopt;
  const Labels all = labels_of(self);
  return Indexed{.inputs = {all, all.substr(0, mask.sizes.size())}, .sizes = {}, .chosen = {}};
}

// (self, indices, values)
OpRule index_put(const OpCall& call) {
  const std::size_t values = call.first_input.at(call.arg_index("values"));
  auto labels = read_mask(call, values - 1);
  const bool by_mask = labels.has_value();
  // LibTorch refuses other values, but not where there is nothing to write.
  if (!by_mask && call.inputs[values].dtype != call.inputs[0].dtype) return no_rule();
  if (!by_mask) labels = read_indices(call, values - 1);
  if (!labels || (!by_mask && !broadcasts(call.inputs[values], labels->sizes))) return no_rule();
  labels->inputs.push_back(broadcast_labels(call.inputs[values].sizes, labels->sizes, labels->chosen));
  const Labels self = labels->inputs[0];
  const bool adds = !by_mask && call.arg("accumulate").toBool() && adds_exactly(call, call.inputs[values]);
  const Labels unsummable = adds ? Labels() : letters(kMostPlaces, 'A');
  OpRule rule{.strategies = shard_factors(labels->inputs, {self}, ReduceOp::kSum, unsummable)};
  rule.outputs = {call.inputs[0]};
  if (adds) add_up(rule, call, values);
  for (const std::size_t d : labels->dims) cut_written(rule, call, d, adds);
  if (by_mask && !call.arg("accumulate").toBool()) {
    replace(rule, call, values);
  } else if (by_mask && adds_exactly(call, call.inputs[values])) {
    add_linear(rule, call.inputs.size(), 1, {{0, values}});
  }
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"index_select", index_select},
    {"index_add", write_along<true>},
    {"index_copy", write_along<false>},
    {"index_reduce", write_along<false>},
    {"index_fill", index_fill},
    {"gather", gather},
    {"scatter", scatter_any},
    {"scatter_add", scatter_reduced},
    {"scatter_reduce", scatter_reduced},
    {"index", index},
    {"_unsafe_index", index},
    {"index_put", index_put},
    {"_index_put_impl", index_put},
    {"_unsafe_index_put", index_put},
};

}  // namespace

std::span<const RuleEntry> indexing_rules() { return kTable; }

}  // namespace tessera::rules

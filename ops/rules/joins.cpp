#include <algorithm>

#include "tessera/ops/rules/kept_views.h"
#include "tessera/ops/rules/labels.h"

// This file has the rules of operators that join tensors, and of those that fill or replace parts of one.
namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

// ---- parts filled

// The result is zero outside the triangle.
OpRule triangle(const OpCall& call) {
  OpRule rule = whole_dims(call, {});
  for (Strategy& strategy : rule.strategies) {
    const Placement& input = strategy.inputs.at(0);
    if (ndim(call) >= 2 && input.is_shard() && input.tensor_dim() >= ndim(call) - 2) strategy.kernel = "triangle";
  }
  return rule;
}

// The argument has pairs of paddings, from the last dimension on. Zeros reduce to zero by every reduction, other values
// only by some.
OpRule pad(const OpCall& call) {
  const Sizes amounts = call.arg("pad").toIntVector();
  Sizes padded;
  for (std::size_t i = 0; i < amounts.size(); ++i) {
    if (amounts[i] != 0) padded.push_back(ndim(call) - 1 - static_cast<int64_t>(i / 2));
  }
  const at::Scalar value = call.arg("value").toScalar();
  if (!value.isComplex() && value.toDouble() == 0) return whole_dims(call, padded);
  const Labels labels = with_whole(labels_of(call.inputs.at(0)), padded);
  OpRule rule{.strategies = shard_factors({labels}, {labels})};
  add_filled(rule, call, value);
  return rule;
}

// The last dimension becomes the diagonal of two dimensions, with zeros elsewhere.
OpRule diag_embed(const OpCall& call) {
  const int64_t n = ndim(call) + 1;
  const Labels batch = labels_of(call.inputs.at(0)).substr(0, static_cast<std::size_t>(n - 2));
  std::vector<int64_t> dims = {call.dim("dim1", n), call.dim("dim2", n)};
  std::sort(dims.begin(), dims.end());
  Labels output = batch;
  for (const int64_t d : dims) output.insert(static_cast<std::size_t>(d), 1, '-');
  OpRule rule = moved(call, {batch + '-'}, output);
  Sizes sizes(call.inputs[0].sizes.begin(), call.inputs[0].sizes.end() - 1);
  const int64_t offset = call.arg("offset").toInt();
  const int64_t side = call.inputs[0].sizes.back() + std::abs(offset);
  for (const int64_t d : dims) sizes.insert(sizes.begin() + d, side);
  keep_diagonal_gradient(rule, call, sizes, call.dim("dim1", n), call.dim("dim2", n), offset);
  rule.outputs = {{.sizes = std::move(sizes), .dtype = call.inputs[0].dtype}};
  return rule;
}

// ---- several tensors

OpRule cat(const OpCall& call) {
  std::size_t n = 0;
  for (const TensorInfo& input : call.inputs) n = std::max(n, input.sizes.size());
  const Sizes dim = {call.dim("dim", static_cast<int64_t>(n))};
  const Labels output = with_whole(letters(n), dim);
  std::vector<Labels> inputs;
  // A tensor of sizes (0) may stand for an empty tensor of any number of dimensions.
  for (const TensorInfo& input : call.inputs) inputs.push_back(input.sizes.size() == n ? output : Labels("-"));
  OpRule rule{.strategies = shard_factors(inputs, {output})};
  add_joint(rule, call);
  keep_joined(rule, call, dim[0]);
  return rule;
}

OpRule stack(const OpCall& call) {
  const Labels input = labels_of(call.inputs.at(0));
  Labels output = input;
  output.insert(static_cast<std::size_t>(call.dim("dim", ndim(call) + 1)), 1, '-');
  OpRule rule{.strategies = shard_factors(std::vector<Labels>(call.inputs.size(), input), {output})};
  add_joint(rule, call);
  return rule;
}

// The inputs are (self, src). A part of self along `dim` is replaced by src, which may or may not have that dimension.
OpRule scatter_part(const OpCall& call) {
  const Sizes dim = {call.dim("dim", ndim(call))};
  const Labels self = with_whole(labels_of(call.inputs.at(0)), dim);
  const bool keeps = call.inputs.at(1).ndim() == ndim(call);
  OpRule rule{.strategies = shard_factors({self, keeps ? self : without(self, dim)}, {self})};
  add_joint(rule, call);
  return rule;
}

// The inputs are (self, src). A diagonal of self is replaced by src.
OpRule diagonal_scatter(const OpCall& call) {
  const Sizes dims = {call.dim("dim1", ndim(call)), call.dim("dim2", ndim(call))};
  const Labels self = with_whole(labels_of(call.inputs.at(0)), dims);
  OpRule rule{.strategies = shard_factors({self, without(self, dims) + '-'}, {self})};
  rule.outputs = {call.inputs[0]};
  add_joint(rule, call);
  return rule;
}

OpRule repeat(const OpCall& call) {
  const Labels all = labels_of(call.inputs.at(0));
  const Sizes repeats = call.arg("repeats").toIntVector();
  const std::size_t added = repeats.size() - all.size();
  Sizes repeated;
  for (std::size_t d = 0; d < all.size(); ++d) {
    if (repeats[added + d] != 1) repeated.push_back(static_cast<int64_t>(d));
  }
  const Labels input = with_whole(all, repeated);
  return moved(call, {input}, Labels(added, '-') + input);
}

constexpr RuleEntry kTable[] = {
    {"tril", triangle},
    {"triu", triangle},
    {"constant_pad_nd", pad},
    {"diag_embed", diag_embed},
    {"cat", cat},
    {"stack", stack},
    {"slice_scatter", scatter_part},
    {"select_scatter", scatter_part},
    {"diagonal_scatter", diagonal_scatter},
    {"repeat", repeat},
};

}  // namespace

std::span<const RuleEntry> join_rules() { return kTable; }

}  // namespace tessera::rules

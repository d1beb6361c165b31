#include <algorithm>
#include <array>
#include <numeric>

#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/view_groups.h"

// Operators that move elements or pick some. A Partial of any reduction passes through them.
namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

OpRule moved(const OpCall& call, const std::vector<Labels>& inputs, const Labels& output) {
  OpRule rule{.strategies = shard_factors(inputs, std::vector<Labels>(num_outputs(call), output))};
  add_movement(rule, call.inputs.size(), num_outputs(call));
  return rule;
}

Labels labels_of(const TensorInfo& info) { return letters(info.sizes.size()); }
int64_t ndim(const OpCall& call) { return call.inputs.at(0).ndim(); }

// ---- view: groups of dimensions with equal products, whose leftmost dimensions share a factor

OpRule regroup(const OpCall& call, const Sizes& from, const Sizes& to) {
  const std::vector<ViewGroup> groups = view_groups(from, to);
  Labels input(from.size(), '-');
  Labels output(to.size(), '-');
  for (std::size_t g = 0; g < groups.size(); ++g) {
    input[groups[g].input_dim] = output[groups[g].output_dim] = static_cast<char>('a' + static_cast<char>(g));
  }
  OpRule rule = moved(call, {input}, output);
  rule.valid = [groups](const std::vector<Placements>& inputs, const std::vector<Placements>&,
                        std::span<const int64_t> mesh_shape) {
    return std::all_of(groups.begin(), groups.end(),
                       [&](const ViewGroup& group) { return same_elements(group, inputs[0], mesh_shape); });
  };
  return rule;
}

// The sizes of a view as asked for, with one -1 worked out.
Sizes asked_sizes(const OpCall& call, const Sizes& from) {
  Sizes to = call.arg("size").toIntVector();
  const auto product = [](const Sizes& s) { return std::accumulate(s.begin(), s.end(), int64_t{1}, std::multiplies<>()); };
  const int64_t known = std::abs(product(to));
  for (int64_t& size : to) {
    if (size == -1) size = known == 0 ? 0 : product(from) / known;
  }
  return to;
}

// view.dtype: the last dimension holds more or fewer elements unless the types are as wide as one another.
OpRule view_dtype(const OpCall& call) {
  const auto& in = call.inputs.at(0);
  const bool same_width = !call.outputs.empty() && c10::elementSize(call.outputs[0].dtype) == c10::elementSize(in.dtype);
  const std::array last = {in.ndim() - 1};
  const Labels labels = same_width ? labels_of(in) : with_whole(labels_of(in), last);
  return {.strategies = shard_factors({labels}, {labels})};
}

OpRule view(const OpCall& call) {
  if (!call.has_arg("size")) return view_dtype(call);
  const Sizes& from = call.inputs.at(0).sizes;
  OpRule rule = regroup(call, from, call.outputs.empty() ? asked_sizes(call, from) : call.outputs[0].sizes);
  rule.size_arg = static_cast<int>(call.arg_index("size"));
  return rule;
}

// No view to autograd, or one that names the strides of the whole in one process; a piece may lie otherwise in memory.
OpRule reshape(const OpCall& call) {
  OpRule rule = view(call);
  rule.kernel = "reshape";
  return rule;
}

// ---- dimensions renamed, added, dropped

OpRule expand(const OpCall& call) {
  const Sizes& from = call.inputs.at(0).sizes;
  Sizes to = call.arg("size").toIntVector();
  for (std::size_t d = 0; d < to.size(); ++d) {
    if (to[d] == -1) to[d] = from.at(d + from.size() - to.size());
  }
  const Labels input = broadcast_labels(from, to, letters(to.size()));
  OpRule rule = moved(call, {input}, Labels(to.size() - from.size(), '-') + input);
  rule.size_arg = static_cast<int>(call.arg_index("size"));
  return rule;
}

OpRule permute(const OpCall& call) {
  const Labels input = labels_of(call.inputs.at(0));
  Labels output;
  for (const int64_t d : call.dims("dims", ndim(call))) output += input[static_cast<std::size_t>(d)];
  return moved(call, {input}, output);
}

OpRule swapped(const OpCall& call, int64_t a, int64_t b) {
  const Labels input = labels_of(call.inputs.at(0));
  Labels output = input;
  if (!input.empty()) std::swap(output[static_cast<std::size_t>(a)], output[static_cast<std::size_t>(b)]);
  return moved(call, {input}, output);
}

OpRule transpose(const OpCall& call) { return swapped(call, call.dim("dim0", ndim(call)), call.dim("dim1", ndim(call))); }

OpRule t(const OpCall& call) { return swapped(call, 0, std::max<int64_t>(ndim(call) - 1, 0)); }

// A piece may have size 1 where the whole has not, and would lose that dimension too: hence the kernel.
OpRule squeeze(const OpCall& call) {
  const auto& in = call.inputs.at(0);
  Sizes dropped;
  for (int64_t d = 0; d < in.ndim(); ++d) {
    const auto asked = call.has_arg("dim") ? call.dims("dim", in.ndim()) : Sizes{d};
    const bool named = std::find(asked.begin(), asked.end(), d) != asked.end();
    if (named && in.sizes[static_cast<std::size_t>(d)] == 1) dropped.push_back(d);
  }
  const Labels input = with_whole(labels_of(in), dropped);
  OpRule rule = moved(call, {input}, without(input, dropped));
  for (Strategy& strategy : rule.strategies) strategy.kernel = "reshape";
  return rule;
}

OpRule unsqueeze(const OpCall& call) {
  const Labels input = labels_of(call.inputs.at(0));
  Labels output = input;
  output.insert(static_cast<std::size_t>(call.dim("dim", ndim(call) + 1)), 1, '-');
  return moved(call, {input}, output);
}

OpRule view_as_real(const OpCall& call) {
  const Labels input = labels_of(call.inputs.at(0));
  OpRule rule{.strategies = shard_factors({input}, {input + '-'})};
  add_linear(rule, 1, 1, {{0}});
  return rule;
}

OpRule view_as_complex(const OpCall& call) {
  Labels output = labels_of(call.inputs.at(0));
  output.pop_back();
  OpRule rule{.strategies = shard_factors({output + '-'}, {output})};
  add_linear(rule, 1, 1, {{0}});
  return rule;
}

// ---- parts of a dimension: it must be whole

// Every result has the input's dimensions, with `whole` ones whole.
OpRule whole_dims(const OpCall& call, const Sizes& whole) {
  const Labels labels = with_whole(labels_of(call.inputs.at(0)), whole);
  return moved(call, {labels}, labels);
}

OpRule whole_dim(const OpCall& call) { return whole_dims(call, {call.dim("dim", ndim(call))}); }

bool same_size(const Sizes& a, const Sizes& b, int64_t dim) {
  return a.at(static_cast<std::size_t>(dim)) == b.at(static_cast<std::size_t>(dim));
}

OpRule slice(const OpCall& call) {
  const int64_t dim = call.dim("dim", ndim(call));
  const bool everything = !call.outputs.empty() && same_size(call.outputs[0].sizes, call.inputs.at(0).sizes, dim);
  return whole_dims(call, everything ? Sizes{} : Sizes{dim});
}

OpRule select(const OpCall& call) {
  const Sizes dim = {call.dim("dim", ndim(call))};
  const Labels input = with_whole(labels_of(call.inputs.at(0)), dim);
  return moved(call, {input}, without(input, dim));
}

// flip and roll tell no sizes without running.
OpRule rearranged(const OpCall& call, const Sizes& dims) {
  OpRule rule = whole_dims(call, dims);
  rule.outputs = {call.inputs.at(0)};
  return rule;
}

OpRule flip(const OpCall& call) { return rearranged(call, call.dims("dims", ndim(call))); }

OpRule roll(const OpCall& call) {
  Sizes dims = call.dims("dims", ndim(call));
  if (dims.empty()) {  // rolls the flattened tensor
    dims.resize(static_cast<std::size_t>(ndim(call)));
    std::iota(dims.begin(), dims.end(), 0);
  }
  return rearranged(call, dims);
}

OpRule diagonal(const OpCall& call) {
  const Sizes dims = {call.dim("dim1", ndim(call)), call.dim("dim2", ndim(call))};
  const Labels input = with_whole(labels_of(call.inputs.at(0)), dims);
  return moved(call, {input}, without(input, dims) + '-');
}

OpRule unfold(const OpCall& call) {
  const Sizes dim = {call.dim("dimension", ndim(call))};
  const Labels input = with_whole(labels_of(call.inputs.at(0)), dim);
  return moved(call, {input}, input + '-');
}

// ---- and their gradients, which are zero elsewhere: zeros reduce to zero by every reduction

OpRule into(const OpCall& call, const Labels& input, const Labels& output) {
  OpRule rule = moved(call, {input}, output);
  rule.size_arg = static_cast<int>(call.arg_index("input_sizes"));
  return rule;
}

Labels input_labels(const OpCall& call) { return letters(call.arg("input_sizes").toIntVector().size()); }

OpRule select_backward(const OpCall& call) {
  const Labels all = input_labels(call);
  const Sizes dim = {call.dim("dim", static_cast<int64_t>(all.size()))};
  return into(call, without(all, dim), with_whole(all, dim));
}

OpRule slice_backward(const OpCall& call) {
  const int64_t dim = call.dim("dim", ndim(call));
  const bool everything = same_size(call.arg("input_sizes").toIntVector(), call.inputs.at(0).sizes, dim);
  const Labels labels = with_whole(input_labels(call), everything ? Sizes{} : Sizes{dim});
  return into(call, labels, labels);
}

OpRule diagonal_backward(const OpCall& call) {
  const Labels all = input_labels(call);
  const auto n = static_cast<int64_t>(all.size());
  const Sizes dims = {call.dim("dim1", n), call.dim("dim2", n)};
  return into(call, without(all, dims) + '-', with_whole(all, dims));
}

// Overlapping windows add up in it, so of the reductions only the linear ones pass.
OpRule unfold_backward(const OpCall& call) {
  const Labels all = input_labels(call);
  const Sizes dim = {call.dim("dim", static_cast<int64_t>(all.size()))};
  OpRule rule{.strategies = shard_factors({with_whole(all, dim) + '-'}, {with_whole(all, dim)})};
  add_linear(rule, 1, 1, {{0}});
  rule.size_arg = static_cast<int>(call.arg_index("input_sizes"));
  rule.outputs = {{.sizes = call.arg("input_sizes").toIntVector(), .dtype = call.inputs.at(0).dtype}};
  return rule;
}

// ---- chosen elements

// Zero outside the triangle.
OpRule triangle(const OpCall& call) { return whole_dims(call, {ndim(call) - 2, ndim(call) - 1}); }

// Pairs of paddings from the last dimension on. Zeros reduce to zero by every reduction, other values do not.
OpRule pad(const OpCall& call) {
  const Sizes amounts = call.arg("pad").toIntVector();
  Sizes padded;
  for (std::size_t i = 0; i < amounts.size(); ++i) {
    if (amounts[i] != 0) padded.push_back(ndim(call) - 1 - static_cast<int64_t>(i / 2));
  }
  if (call.arg("value").toScalar().toDouble() == 0) return whole_dims(call, padded);
  const Labels labels = with_whole(labels_of(call.inputs.at(0)), padded);
  return {.strategies = shard_factors({labels}, {labels})};
}

// (self, index of one dimension): I for its elements.
OpRule index_select(const OpCall& call) {
  const auto dim = static_cast<std::size_t>(call.dim("dim", ndim(call)));
  Labels self = labels_of(call.inputs.at(0));
  Labels output = self;
  if (self.empty() || call.inputs.at(1).ndim() != 1) return {};
  self[dim] = '-';
  output[dim] = 'I';
  OpRule rule = moved(call, {self, "I"}, output);
  rule.outputs = {call.inputs[0]};
  rule.outputs[0].sizes[dim] = call.inputs[1].sizes[0];
  return rule;
}

// (self, index): elsewhere than at `dim` the index may be shorter, and its elements then stand for the first ones.
OpRule gather(const OpCall& call) {
  const Sizes& self_sizes = call.inputs.at(0).sizes;
  const Sizes& index_sizes = call.inputs.at(1).sizes;
  if (self_sizes.size() != index_sizes.size() || self_sizes.empty()) return {};
  const auto dim = static_cast<std::size_t>(call.dim("dim", ndim(call)));
  Labels self = broadcast_labels(self_sizes, index_sizes, labels_of(call.inputs[0]));
  Labels index = self;
  self[dim] = '-';
  index[dim] = 'I';
  return moved(call, {self, index}, index);
}

// ---- several tensors

constexpr std::array kAllReductions = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct};

// All tensors pending together, of one type.
void add_joint(OpRule& rule, const OpCall& call) {
  std::vector<std::size_t> all(call.inputs.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  for (const TensorInfo& input : call.inputs) {
    if (input.dtype != call.inputs[0].dtype) return;
  }
  for (const ReduceOp op : kAllReductions) rule.strategies.push_back(pass_partial(all.size(), num_outputs(call), all, op));
}

OpRule cat(const OpCall& call) {
  std::size_t n = 0;
  for (const TensorInfo& input : call.inputs) n = std::max(n, input.sizes.size());
  const Sizes dim = {call.dim("dim", static_cast<int64_t>(n))};
  const Labels output = with_whole(letters(n), dim);
  std::vector<Labels> inputs;
  // A tensor of sizes (0) may stand in for one of any number of dimensions.
  for (const TensorInfo& input : call.inputs) inputs.push_back(input.sizes.size() == n ? output : Labels("-"));
  OpRule rule{.strategies = shard_factors(inputs, {output})};
  add_joint(rule, call);
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

// (self, src): a part of self along `dim` replaced by src, which has that dimension or not.
OpRule scatter_part(const OpCall& call) {
  const Sizes dim = {call.dim("dim", ndim(call))};
  const Labels self = with_whole(labels_of(call.inputs.at(0)), dim);
  const bool keeps = call.inputs.at(1).ndim() == ndim(call);
  OpRule rule{.strategies = shard_factors({self, keeps ? self : without(self, dim)}, {self})};
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
    {"view", view},
    {"_unsafe_view", reshape},
    {"_reshape_alias", reshape},
    {"_reshape_copy", view},
    {"view_copy", view},
    {"expand", expand},
    {"expand_copy", expand},
    {"permute", permute},
    {"permute_copy", permute},
    {"transpose", transpose},
    {"transpose_copy", transpose},
    {"t", t},
    {"t_copy", t},
    {"squeeze", squeeze},
    {"unsqueeze", unsqueeze},
    {"unsqueeze_copy", unsqueeze},
    {"view_as_real", view_as_real},
    {"view_as_complex", view_as_complex},
    {"slice", slice},
    {"select", select},
    {"split", whole_dim},
    {"split_with_sizes", whole_dim},
    {"unsafe_split", whole_dim},
    {"unsafe_split_with_sizes", whole_dim},
    {"unbind", select},
    {"flip", flip},
    {"roll", roll},
    {"diagonal", diagonal},
    {"unfold", unfold},
    {"select_backward", select_backward},
    {"slice_backward", slice_backward},
    {"diagonal_backward", diagonal_backward},
    {"unfold_backward", unfold_backward},
    {"tril", triangle},
    {"triu", triangle},
    {"constant_pad_nd", pad},
    {"index_select", index_select},
    {"gather", gather},
    {"cat", cat},
    {"stack", stack},
    {"slice_scatter", scatter_part},
    {"select_scatter", scatter_part},
    {"repeat", repeat},
};

}  // namespace

std::span<const RuleEntry> view_rules() { return kTable; }

}  // namespace tessera::rules

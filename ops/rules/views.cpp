#include <algorithm>
#include <array>
#include <numeric>

#include <c10/util/accumulate.h>

#include "tessera/ops/rules/kept_views.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/view_groups.h"

// This file has the rules of views, their copies and their gradients. A plain reduction (kPlainReductions) stays
// pending through them; a norm and a user's reduction are done first.
namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

// ---- view: groups of dimensions with equal products; their leftmost dimensions share a factor

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

// Returns the sizes that the view asks for, with a -1 replaced by the size that it stands for.
Sizes asked_sizes(const OpCall& call, const Sizes& from) {
  Sizes to = call.arg("size").toIntVector();
  const int64_t known = std::abs(c10::multiply_integers(to));
  for (int64_t& size : to) {
    if (size == -1) size = known == 0 ? 0 : c10::multiply_integers(from) / known;
  }
  return to;
}

// view.dtype: the last dimension changes its size unless both dtypes have the same width.
OpRule view_dtype(const OpCall& call) {
  const auto& in = call.inputs.at(0);
  const bool same_width =
      !call.outputs.empty() && c10::elementSize(call.outputs[0].dtype) == c10::elementSize(in.dtype);
  const std::array last = {in.ndim() - 1};
  const Labels labels = same_width ? labels_of(in) : with_whole(labels_of(in), last);
  return {.strategies = shard_factors({labels}, {labels})};
}

OpRule view(const OpCall& call) {
  if (!call.has_arg("size")) return view_dtype(call);
  const Sizes& from = call.inputs.at(0).sizes;
  const Sizes to = call.outputs.empty() ? asked_sizes(call, from) : call.outputs[0].sizes;
  OpRule rule = regroup(call, from, to);
  keep_cuts(rule, call, {regroup_tiles(from, to)}, "");
  rule.size_arg = static_cast<int>(call.arg_index("size"));
  return rule;
}

// This is for operators that are no views to autograd or that name the strides of the global tensor: a piece may have
// other strides, so it is reshaped by its local sizes.
OpRule reshape(const OpCall& call) {
  OpRule rule = view(call);
  rule.kernel = "reshape";
  return rule;
}

// ---- dimensions renamed, added or removed

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

OpRule transpose(const OpCall& call) {
  return swapped(call, call.dim("dim0", ndim(call)), call.dim("dim1", ndim(call)));
}

OpRule t(const OpCall& call) { return swapped(call, 0, std::max<int64_t>(ndim(call) - 1, 0)); }

// A piece may have size 1 where the tensor does not; the operator itself would remove that dimension too. The kernel
// does not.
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

// ---- parts of a dimension, which must not be cut unless OpRule::outputs_for applies

int64_t size_of(const Sizes& sizes, int64_t dim) { return sizes.at(static_cast<std::size_t>(dim)); }
bool same_size(const Sizes& a, const Sizes& b, int64_t dim) { return size_of(a, dim) == size_of(b, dim); }

// This is also the rule of narrow_copy, which names the length of the part: even where that is everything, a piece does
// not have it.
OpRule slice(const OpCall& call) {
  const int64_t dim = call.dim("dim", ndim(call));
  const bool everything = !call.has_arg("length") && !call.outputs.empty() &&
                          same_size(call.outputs[0].sizes, call.inputs.at(0).sizes, dim);
  OpRule rule = whole_dims(call, everything ? Sizes{} : Sizes{dim});
  if (!everything && !call.outputs.empty()) {
    const int64_t start = slice_start(call.arg("start").toOptional<int64_t>(), size_of(call.inputs[0].sizes, dim));
    const int64_t step = call.has_arg("step") ? call.arg("step").toInt() : 1;
    keep_cuts(rule, call, {slice_tiles(dim, start, step, size_of(call.outputs[0].sizes, dim))}, "parts");
  }
  return rule;
}

// The results are adjacent parts that make up the whole.
OpRule split(const OpCall& call) {
  const int64_t dim = call.dim("dim", ndim(call));
  OpRule rule = whole_dims(call, {dim});
  std::vector<TileView> views;
  int64_t start = 0;
  for (const TensorInfo& output : call.outputs) {
    const int64_t length = size_of(output.sizes, dim);
    views.push_back(slice_tiles(dim, start, 1, length));
    start += length;
  }
  keep_cuts(rule, call, std::move(views), "parts");
  return rule;
}

// This is the rule of select and unbind.
OpRule select(const OpCall& call) {
  const Sizes dim = {call.dim("dim", ndim(call))};
  const Labels input = with_whole(labels_of(call.inputs.at(0)), dim);
  OpRule rule = moved(call, {input}, without(input, dim));
  std::vector<TileView> views;
  const int64_t size = size_of(call.inputs[0].sizes, dim[0]);
  const int64_t asked = call.has_arg("index") ? call.arg("index").toInt() : 0;
  for (std::size_t k = 0; k < call.outputs.size(); ++k) {
    views.push_back(select_tiles(dim[0], (asked < 0 ? asked + size : asked) + static_cast<int64_t>(k)));
  }
  keep_cuts(rule, call, std::move(views), "parts");
  return rule;
}

// For flip and roll LibTorch does not tell the sizes without running them.
OpRule rearranged(const OpCall& call, const Sizes& dims) {
  OpRule rule = whole_dims(call, dims);
  rule.outputs = {call.inputs.at(0)};
  return rule;
}

OpRule flip(const OpCall& call) { return rearranged(call, call.dims("dims", ndim(call))); }

OpRule roll(const OpCall& call) {
  Sizes dims = call.dims("dims", ndim(call));
  const std::size_t shifts = call.arg("shifts").toIntVector().size();
  if (shifts != std::max<std::size_t>(dims.size(), 1)) return no_rule();  // LibTorch refuses it
  if (dims.empty()) {                                                     // it rolls the flattened tensor
    dims.resize(static_cast<std::size_t>(ndim(call)));
    std::iota(dims.begin(), dims.end(), 0);
  }
  return rearranged(call, dims);
}

OpRule diagonal(const OpCall& call) {
  const Sizes dims = {call.dim("dim1", ndim(call)), call.dim("dim2", ndim(call))};
  const Labels input = with_whole(labels_of(call.inputs.at(0)), dims);
  OpRule rule = moved(call, {input}, without(input, dims) + '-');
  if (!call.outputs.empty()) {
    keep_cuts(rule, call, {diagonal_tiles(dims[0], dims[1], call.arg("offset").toInt(), call.outputs[0].sizes.back())},
              "diagonal");
  }
  return rule;
}

OpRule unfold(const OpCall& call) {
  const Sizes dim = {call.dim("dimension", ndim(call))};
  const Labels input = with_whole(labels_of(call.inputs.at(0)), dim);
  return moved(call, {input}, input + '-');
}

// ---- gradients of parts, which are zero elsewhere; zeros reduce to zero by every plain reduction

OpRule into(const OpCall& call, const Labels& input, const Labels& output) {
  OpRule rule = moved(call, {input}, output);
  rule.size_arg = static_cast<int>(call.arg_index("input_sizes"));
  return rule;
}

Labels input_labels(const OpCall& call) { return letters(call.arg("input_sizes").toIntVector().size()); }

OpRule select_backward(const OpCall& call) {
  const Labels all = input_labels(call);
  const Sizes dim = {call.dim("dim", static_cast<int64_t>(all.size()))};
  OpRule rule = into(call, without(all, dim), with_whole(all, dim));
  const Sizes sizes = call.arg("input_sizes").toIntVector();
  const int64_t asked = call.arg("index").toInt();
  const int64_t index = asked < 0 ? asked + size_of(sizes, dim[0]) : asked;
  keep_gradient(rule, call, sizes, dim[0], select_tiles(dim[0], index));
  return rule;
}

OpRule slice_backward(const OpCall& call) {
  const int64_t dim = call.dim("dim", ndim(call));
  const Sizes sizes = call.arg("input_sizes").toIntVector();
  const bool everything = same_size(sizes, call.inputs.at(0).sizes, dim);
  const Labels labels = with_whole(input_labels(call), everything ? Sizes{} : Sizes{dim});
  OpRule rule = into(call, labels, labels);
  if (!everything) {
    const int64_t start = slice_start(call.arg("start").toInt(), size_of(sizes, dim));
    const int64_t step = call.arg("step").toInt();
    keep_gradient(rule, call, sizes, dim, slice_tiles(dim, start, step, size_of(call.inputs[0].sizes, dim)),
                  step == 1 ? std::optional(start) : std::nullopt);
  }
  return rule;
}

OpRule diagonal_backward(const OpCall& call) {
  const Labels all = input_labels(call);
  const auto n = static_cast<int64_t>(all.size());
  const Sizes dims = {call.dim("dim1", n), call.dim("dim2", n)};
  OpRule rule = into(call, without(all, dims) + '-', with_whole(all, dims));
  const Sizes sizes = call.arg("input_sizes").toIntVector();
  keep_diagonal_gradient(rule, call, sizes, dims[0], dims[1], call.arg("offset").toInt());
  return rule;
}

// Overlapping windows are added in it, so only linear reductions can stay pending.
OpRule unfold_backward(const OpCall& call) {
  const Labels all = input_labels(call);
  const Sizes dim = {call.dim("dim", static_cast<int64_t>(all.size()))};
  OpRule rule{.strategies = shard_factors({with_whole(all, dim) + '-'}, {with_whole(all, dim)})};
  add_linear(rule, 1, 1, {{0}});
  rule.size_arg = static_cast<int>(call.arg_index("input_sizes"));
  rule.outputs = {{.sizes = call.arg("input_sizes").toIntVector(), .dtype = call.inputs.at(0).dtype}};
  return rule;
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
    {"split", split},
    {"split_with_sizes", split},
    {"unsafe_split", split},
    {"unsafe_split_with_sizes", split},
    {"unbind", select},
    {"flip", flip},
    {"roll", roll},
    {"diagonal", diagonal},
    {"unfold", unfold},
    {"view_as_real_copy", view_as_real},
    {"view_as_complex_copy", view_as_complex},
    {"slice_copy", slice},
    {"select_copy", select},
    {"split_copy", split},
    {"split_with_sizes_copy", split},
    {"unbind_copy", select},
    {"squeeze_copy", squeeze},
    {"diagonal_copy", diagonal},
    {"unfold_copy", unfold},
    {"_reshape_alias_copy", reshape},
    {"narrow_copy", slice},
    {"select_backward", select_backward},
    {"slice_backward", slice_backward},
    {"diagonal_backward", diagonal_backward},
    {"unfold_backward", unfold_backward},
};

}  // namespace

std::span<const RuleEntry> view_rules() { return kTable; }

}  // namespace tessera::rules

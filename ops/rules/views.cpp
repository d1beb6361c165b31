#include <algorithm>
#include <array>
#include <numeric>

#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/view_groups.h"
#include "tessera/ops/rules/view_tiles.h"
#include "tessera/placement/reduction.h"
#include "tessera/placement/tile_layout.h"

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

// ---- views of dimensions that are cut, each rank viewing its piece

// Whether partitions of a fixed size or number of parts stand where they fit.
bool fits(const Sizes& sizes, const Placements& cuts, std::span<const int64_t> mesh_shape) {
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const auto as_fixed = [](const Partition& partition, int64_t size, int64_t parts) {
      return partition.parts().value_or(parts) == parts && partition.size().value_or(size) == size;
    };
    if (!every_cut(sizes[d], cuts_of(static_cast<int64_t>(d), cuts, mesh_shape), as_fixed)) return false;
  }
  return true;
}

// The layout of a view of sizes `to` of a tensor of sizes `from` in layout `input`: reductions other than the plain ones may not
// know what becomes of their elements.
std::optional<Placements> viewed_layout(const Sizes& from, const Sizes& to, const TileView& view, const Placements& input,
                                        std::span<const int64_t> mesh_shape) {
  constexpr int64_t kMostRanks = 1 << 16;
  Placements cuts;
  Sizes cut_by;  // sizes of the mesh dimensions that cut
  int64_t ranks = 1;
  for (std::size_t i = 0; i < input.size(); ++i) {
    if (input[i].is_partial() && input[i].reduction_ptr() != plain_reduction(input[i].reduction().op())) return std::nullopt;
    if (!input[i].is_shard()) continue;
    cuts.push_back(input[i]);
    cut_by.push_back(mesh_shape[i]);
    ranks *= mesh_shape[i];
  }
  if (cuts.empty() || ranks > kMostRanks || !fits(from, cuts, cut_by)) return std::nullopt;
  std::vector<Tile> tiles;
  Sizes coordinate(cut_by.size(), 0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::optional<Tile> tile = view(local_tile(from, cuts, cut_by, coordinate));
    if (!tile) return std::nullopt;
    tiles.push_back(*std::move(tile));
    for (std::size_t i = coordinate.size(); i-- > 0 && ++coordinate[i] == cut_by[i];) coordinate[i] = 0;
  }
  const std::optional<Placements> found = layout_of_tiles(to, cut_by, tiles);
  if (!found) return std::nullopt;
  Placements out = input;
  std::size_t next = 0;
  for (Placement& p : out) {
    if (p.is_shard()) p = (*found)[next++];
  }
  return out;
}

// Of views of input 0, one a result.
void keep_cuts(OpRule& rule, const OpCall& call, std::vector<TileView> views, std::string_view kernel) {
  std::vector<Sizes> sizes;
  for (const TensorInfo& output : call.outputs) sizes.push_back(output.sizes);
  if (sizes.size() != views.size()) return;
  rule.keep_kernel = kernel;
  rule.keep = [from = call.inputs.at(0).sizes, sizes = std::move(sizes), views = std::move(views)](
                  const std::vector<Placements>& inputs,
                  std::span<const int64_t> mesh_shape) -> std::optional<std::vector<Placements>> {
    std::vector<Placements> out;
    for (std::size_t k = 0; k < views.size(); ++k) {
      std::optional<Placements> layout = viewed_layout(from, sizes[k], views[k], inputs[0], mesh_shape);
      if (!layout) return std::nullopt;
      out.push_back(*std::move(layout));
    }
    return out;
  };
}

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
  const Sizes to = call.outputs.empty() ? asked_sizes(call, from) : call.outputs[0].sizes;
  OpRule rule = regroup(call, from, to);
  keep_cuts(rule, call, {regroup_tiles(from, to)}, "");
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

int64_t size_of(const Sizes& sizes, int64_t dim) { return sizes.at(static_cast<std::size_t>(dim)); }
bool same_size(const Sizes& a, const Sizes& b, int64_t dim) { return size_of(a, dim) == size_of(b, dim); }

OpRule slice(const OpCall& call) {
  const int64_t dim = call.dim("dim", ndim(call));
  const bool everything = !call.outputs.empty() && same_size(call.outputs[0].sizes, call.inputs.at(0).sizes, dim);
  OpRule rule = whole_dims(call, everything ? Sizes{} : Sizes{dim});
  if (!everything && !call.outputs.empty()) {
    const int64_t start = slice_start(call.arg("start").toOptional<int64_t>(), size_of(call.inputs[0].sizes, dim));
    keep_cuts(rule, call, {slice_tiles(dim, start, call.arg("step").toInt(), size_of(call.outputs[0].sizes, dim))}, "parts");
  }
  return rule;
}

// Neighbouring parts that make the whole.
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

// select and unbind.
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

// The placements of a tensor that has dimension `dim` more.
Placements lifted(Placements placements, int64_t dim) {
  for (Placement& p : placements) {
    if (p.is_shard() && p.tensor_dim() >= dim) p = p.on(p.tensor_dim() + 1);
  }
  return placements;
}

// The layouts of what `view` was taken of, of sizes `sizes`, in which the gradient is where its elements are: those with Shard(dim) in
// the place of some of the gradient's cuts.
void keep_gradient(OpRule& rule, const OpCall& call, const Sizes& sizes, int64_t dim, TileView view) {
  rule.keep_kernel = "parts_backward";
  rule.keep = [=, to = call.inputs.at(0).sizes, view = std::move(view)](
                  const std::vector<Placements>& inputs,
                  std::span<const int64_t> mesh_shape) -> std::optional<std::vector<Placements>> {
    constexpr std::size_t kMostTried = 5;  // of mesh dimensions
    const std::size_t n = inputs[0].size();
    if (n > kMostTried) return std::nullopt;
    for (uint32_t replaced = 1; replaced < (uint32_t{1} << n); ++replaced) {
      Placements candidate = to.size() == sizes.size() ? inputs[0] : lifted(inputs[0], dim);
      bool cut = true;
      for (std::size_t i = 0; i < n; ++i) {
        if ((replaced >> i & 1) == 0) continue;
        cut = cut && inputs[0][i].is_shard();
        candidate[i] = Shard(dim);
      }
      if (cut && viewed_layout(sizes, to, view, candidate, mesh_shape) == inputs[0])
        return std::vector<Placements>{candidate};
    }
    return std::nullopt;
  };
}

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
    keep_gradient(rule, call, sizes, dim,
                  slice_tiles(dim, start, call.arg("step").toInt(), size_of(call.inputs[0].sizes, dim)));
  }
  return rule;
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
    {"split", split},
    {"split_with_sizes", split},
    {"unsafe_split", split},
    {"unsafe_split_with_sizes", split},
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

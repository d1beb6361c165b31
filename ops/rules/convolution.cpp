#include <algorithm>

#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/view_groups.h"

// This file has the rules of convolution, which may be cut along the batch (n), the input channels (c), the output
// channels (o), the channel groups (g) and the spatial dimensions.
namespace tessera::rules {
namespace {

// Returns the entry for dimension d of a list with one number per dimension, or one number for all dimensions.
int64_t at_dim(const c10::IValue& list, std::size_t d) {
  const auto values = list.toIntVector();
  return values.size() == 1 ? values[0] : values.at(d);
}

using Sizes = std::vector<int64_t>;

// Holds labels and sizes that a convolution and its backward share.
struct Convolution {
  Convolution(const OpCall& call, std::size_t of_input, std::size_t of_weight)
      : input(call.inputs.at(of_input).sizes),
        weight(call.inputs.at(of_weight).sizes),
        transposed(call.arg("transposed").toBool()),
        groups(call.arg("groups").toInt()) {}

  // Returns labels for a tensor with spatial dimensions: `first`, and '-' for the spatial ones.
  Labels with_places(Labels first) const {
    first.resize(input.size(), '-');
    return first;
  }
  Labels given() const { return with_places(groups == 1 ? "nc" : "ng"); }
  Labels gives() const { return with_places(groups == 1 ? "no" : "ng"); }
  Labels kernels() const { return with_places(groups > 1 ? "g" : transposed ? "co" : "oc"); }
  Labels channels() const { return groups == 1 ? "o" : "g"; }
  int64_t channels_out() const { return transposed ? weight[1] * groups : weight[0]; }

  const Sizes& input;
  const Sizes& weight;
  const bool transposed;
  const int64_t groups;
};

Sizes convolution_sizes(const OpCall& call, const Convolution& conv) {
  Sizes out = {conv.input[0], conv.channels_out()};
  for (std::size_t d = 2; d < conv.input.size(); ++d) {
    const int64_t stride = at_dim(call.arg("stride"), d - 2);
    const int64_t reach =
        at_dim(call.arg("dilation"), d - 2) * (conv.weight[d] - 1) - 2 * at_dim(call.arg("padding"), d - 2);
    out.push_back(conv.transposed ? (conv.input[d] - 1) * stride + reach + at_dim(call.arg("output_padding"), d - 2) + 1
                                  : (conv.input[d] - reach - 1) / stride + 1);
  }
  return out;
}

Halos halos_of(const OpCall& call, const Convolution& conv, const Sizes& result) {
  Halos out;
  for (std::size_t d = 2; d < conv.input.size(); ++d) {
    out.dims.push_back(static_cast<int64_t>(d));
    out.windows.push_back({.wide_size = conv.transposed ? result[d] : conv.input[d],
                           .narrow_size = conv.transposed ? conv.input[d] : result[d],
                           .kernel = conv.weight[d],
                           .stride = at_dim(call.arg("stride"), d - 2),
                           .padding = at_dim(call.arg("padding"), d - 2),
                           .dilation = at_dim(call.arg("dilation"), d - 2)});
  }
  return out;
}

// Says whether the output_padding is below stride or dilation, without which LibTorch refuses it. On a cut dimension
// our kernel makes the padding, and LibTorch does not see it.
bool pads_output_in_steps(const OpCall& call, const Convolution& conv) {
  for (std::size_t d = 0; conv.transposed && d + 2 < conv.input.size(); ++d) {
    const int64_t most = std::max(at_dim(call.arg("stride"), d), at_dim(call.arg("dilation"), d));
    if (at_dim(call.arg("output_padding"), d) >= most) return false;
  }
  return true;
}

// Returns whether pieces of `channels` channels, which are dimension 1 under `placements`, consist of whole groups.
bool whole_groups(int64_t channels, int64_t groups, const Placements& placements, std::span<const int64_t> mesh_shape) {
  Placements of_channels(placements.size(), Replicate());
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (placements[i].is_shard(1)) of_channels[i] = placements[i].on(0);
  }
  return std::ranges::all_of(view_groups({channels}, {groups, channels / groups}),
                             [&](const ViewGroup& group) { return same_elements(group, of_channels, mesh_shape); });
}

// Sets rule.valid. Input `given` is laid out as the convolution's input; input `gives`, or the first result if nullopt,
// as its output.
void keep_pieces(OpRule& rule, const Convolution& conv, std::size_t given, std::optional<std::size_t> gives) {
  const std::optional<Halos> halos = rule.halos;
  const int64_t groups = conv.groups;
  rule.valid = [halos, groups, given, gives, in = conv.input[1], out = conv.channels_out()](
                   const std::vector<Placements>& inputs, const std::vector<Placements>& outputs,
                   std::span<const int64_t> mesh_shape) {
    const Placements& other = gives ? inputs[*gives] : outputs[0];
    if (groups > 1 &&
        (!whole_groups(in, groups, inputs[given], mesh_shape) || !whole_groups(out, groups, other, mesh_shape))) {
      return false;
    }
    if (!halos) return true;
    return gives ? computes_ranges(*halos, other, inputs[given], mesh_shape)
                 : computes_ranges(*halos, inputs[given], other, mesh_shape);
  };
}

// The inputs are (input, weight, bias). Where the input channels are cut, the results are terms, and the bias must be a
// term too, so that it is added once.
OpRule convolution(const OpCall& call) {
  const Convolution conv(call, 0, 1);
  if (!pads_output_in_steps(call, conv)) return no_rule();
  const bool has_bias = call.inputs.at(2).defined;
  OpRule rule{.strategies = shard_factors({conv.given(), conv.kernels(), conv.channels()}, {conv.gives()})};
  for (Strategy& strategy : rule.strategies) {
    if (strategy.outputs[0].is_partial()) strategy.inputs[2] = Partial();
    if (strategy.inputs[0].is_shard(1)) strategy.kernel = "convolution";
  }
  const Sizes sizes = convolution_sizes(call, conv);
  if (!has_zero(sizes) && !has_zero(conv.input)) {
    rule.halos = halos_of(call, conv, sizes);
    rule.halos->inputs = {0};
    rule.halos->wide = !conv.transposed;
    for (const int64_t d : rule.halos->dims) {
      rule.strategies.push_back(
          {.inputs = {Shard(d), Replicate(), Replicate()}, .outputs = {Shard(d)}, .kernel = "convolution"});
    }
  }
  const std::vector<std::vector<std::size_t>> alone = {{0}, {1}};
  const std::vector<std::vector<std::size_t>> with_bias = {{0, 2}, {1, 2}};
  add_linear_where_exact(rule, call, has_bias ? with_bias : alone);
  keep_pieces(rule, conv, 0, std::nullopt);
  rule.outputs = {{.sizes = sizes, .dtype = call.inputs[0].dtype}};
  return rule;
}

// Maps (grad, input, weight) to the gradients of input, weight and bias. Where spatial dimensions are cut, each rank
// fetches the rows of the gradient that its own rows of the input contribute to. Each pair of an input row and a
// gradient row then contributes to the weight's gradient on exactly one rank.
OpRule convolution_backward(const OpCall& call) {
  const Convolution conv(call, 1, 2);
  OpRule rule{.strategies = shard_factors({conv.gives(), conv.given(), conv.kernels()},
                                          {conv.given(), conv.kernels(), conv.channels()})};
  for (Strategy& strategy : rule.strategies) {
    const bool channels_in = strategy.inputs[0].is_replicate();
    if (channels_in) strategy.outputs[2] = Replicate();
    if (!strategy.inputs[0].is_shard(0)) strategy.kernel = "convolution_backward";
  }
  const auto& in = call.inputs;
  if (!has_zero(in[0].sizes) && !has_zero(conv.input)) {
    rule.halos = halos_of(call, conv, in[0].sizes);
    rule.halos->inputs = {0};
    rule.halos->wide = conv.transposed;
    rule.halos->anchor = 1;
    for (const int64_t d : rule.halos->dims) {
      rule.strategies.push_back({.inputs = {Shard(d), Shard(d), Replicate()},
                                 .outputs = {Shard(d), Partial(), Partial()},
                                 .kernel = "convolution_backward"});
    }
  }
  keep_pieces(rule, conv, 1, 0);
  rule.outputs = asked_for(call, {in[1], in[2], {.sizes = {in[0].sizes[1]}, .dtype = in[0].dtype}});
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"convolution", convolution},
    {"_convolution", convolution},
    {"convolution_backward", convolution_backward},
};

}  // namespace

std::span<const RuleEntry> convolution_rules() { return kTable; }

}  // namespace tessera::rules

#include <algorithm>
#include <initializer_list>

#include <c10/util/accumulate.h>

#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/view_groups.h"

// This file has the rules of norms. Batch norms in training share statistics among ranks; ops/kernels/batch_norm.cpp
// writes them in terms of other operators.
namespace tessera::rules {
namespace {

// ---- the last dimensions are normalized

struct NormLabels {
  Labels input;
  Labels statistics;  // which have size 1 in the normalized dimensions
  Labels weight;      // also of the bias
};

// Labels the normalized dimensions '-', or by letters where they may be cut.
NormLabels norm_labels(const OpCall& call, bool cut = false) {
  const std::size_t normalized = call.arg("normalized_shape").toIntVector().size();
  const std::size_t outer = call.inputs.at(0).sizes.size() - normalized;
  const Labels lines = letters(outer), whole(normalized, '-');
  const Labels weight = cut ? letters(normalized, 'A') : whole;
  return {.input = lines + weight, .statistics = lines + whole, .weight = weight};
}

// Returns whether ranks can join what they find in pieces of the normalized dimensions. What LibTorch refuses is left
// to it, and so are tensors without elements. `weights` lists the inputs that are weights.
bool can_join(const OpCall& call, std::initializer_list<std::size_t> weights) {
  const TensorInfo& input = call.inputs.at(0);
  const std::vector<int64_t> shape = call.arg("normalized_shape").toIntVector();
  if (shape.empty() || shape.size() > input.sizes.size() || c10::multiply_integers(input.sizes) == 0) return false;
  if (!at::isFloatingType(input.dtype) || c10::elementSize(input.dtype) == 1) return false;
  if (!std::equal(shape.rbegin(), shape.rend(), input.sizes.rbegin())) return false;
  const bool narrow = input.dtype == at::kHalf || input.dtype == at::kBFloat16;
  return std::ranges::all_of(weights, [&](std::size_t j) {
    const TensorInfo& weight = call.inputs.at(j);
    const bool takes_type = weight.dtype == input.dtype || (narrow && weight.dtype == at::kFloat);
    return !weight.defined || (weight.sizes == shape && takes_type);
  });
}

// Gives the strategies that cut a normalized dimension a kernel, which communicates `of_line` for each line that is
// normalized, and whose statistics all ranks have.
void join(OpRule& rule, const OpCall& call, std::string_view kernel, const Strategy::Joined& of_line) {
  const std::vector<int64_t>& sizes = call.inputs.at(0).sizes;
  const auto outer = std::ssize(sizes) - std::ssize(call.arg("normalized_shape").toIntVector());
  double lines = 1;
  for (int64_t d = 0; d < outer; ++d) lines *= static_cast<double>(sizes[static_cast<std::size_t>(d)]);
  for (Strategy& strategy : rule.strategies) {
    const Placement& input = strategy.inputs.at(0);
    if (!input.is_shard() || input.tensor_dim() < outer) continue;
    strategy.kernel = kernel;
    strategy.joined = {.reduced = of_line.reduced * lines, .gathered = of_line.gathered * lines};
    for (Placement& output : strategy.outputs) {
      if (output.is_partial()) output = Replicate();
    }
  }
}

// Returns the dtype of the mean and the inverse deviation. It is wider than a half input's on CUDA, and on CPU if the
// weight's is.
at::ScalarType statistics_type(const OpCall& call) {
  const at::ScalarType type = call.inputs.at(0).dtype;
  const bool half = type == at::kHalf || type == at::kBFloat16;
  const auto is_float = [&](std::size_t i) { return call.inputs.at(i).defined && call.inputs[i].dtype == at::kFloat; };
  return half && (call.args[0].toTensor().is_cuda() || is_float(1) || is_float(2)) ? at::kFloat : type;
}

// (input, weight, bias) -> (result, mean, rstd)
OpRule layer_norm(const OpCall& call) {
  const bool joins = can_join(call, {1, 2});
  const auto [input, of_lines, weight] = norm_labels(call, joins);
  OpRule rule{.strategies = shard_factors({input, weight, weight}, {input, of_lines, of_lines})};
  if (joins) join(rule, call, "layer_norm", {.gathered = 16});
  std::vector<int64_t> statistics = call.inputs.at(0).sizes;
  std::fill(statistics.end() - static_cast<int64_t>(weight.size()), statistics.end(), 1);
  const TensorInfo of_statistics{.sizes = statistics, .dtype = statistics_type(call)};
  rule.outputs = {call.inputs[0], of_statistics, of_statistics};
  return rule;
}

// Maps (grad, input, mean, rstd, weight, bias) to the gradients of input, weight and bias. A pending gradient is
// reduced before: if it stayed pending, three gradients would have to be reduced.
OpRule layer_norm_backward(const OpCall& call) {
  const bool joins = can_join(call, {4, 5}) && call.inputs.at(1).sizes == call.inputs.at(0).sizes;
  const auto [input, of_lines, weight] = norm_labels(call, joins);
  OpRule rule{.strategies = shard_factors({input, input, of_lines, of_lines, weight, weight}, {input, weight, weight})};
  if (joins) join(rule, call, "layer_norm_backward", {.reduced = call.inputs[0].dtype == at::kDouble ? 16.0 : 8.0});
  rule.outputs = asked_for(call, {call.inputs.at(1), call.inputs.at(4), call.inputs.at(5)});
  rule.kernel = "contiguous_statistics";
  return rule;
}

// (input, weight) -> (result, rstd)
OpRule rms_norm(const OpCall& call) {
  const auto [input, of_lines, weight] = norm_labels(call);
  return {.strategies = shard_factors({input, weight}, {input, of_lines})};
}

// (grad, input, rstd, weight) -> the gradients of input and weight
OpRule rms_norm_backward(const OpCall& call) {
  const auto [input, of_lines, weight] = norm_labels(call);
  return {.strategies = shard_factors({input, input, of_lines, weight}, {input, weight}),
          .kernel = "contiguous_statistics"};
}

// ---- groups of channels: n labels the batch, c the channels, which may be cut between groups

Labels with_rest(Labels labels, const TensorInfo& info) {
  labels.resize(info.sizes.size(), '-');
  return labels;
}

// Labels the channels c where there is more than one group to cut.
Labels group_labels(const OpCall& call) { return call.arg("group").toInt() == 1 ? "n-" : "nc"; }

// Makes rule.valid require pieces of whole groups of channels.
void keep_groups(OpRule& rule, const OpCall& call, std::size_t input) {
  const int64_t channels = call.arg("C").toInt();
  const int64_t groups = call.arg("group").toInt();
  if (groups == 0 || channels % groups != 0) return;
  const std::vector<ViewGroup> found = view_groups({channels}, {groups, channels / groups});
  rule.kernel = "group_norm";
  rule.valid = [=](const std::vector<Placements>& inputs, const std::vector<Placements>&,
                   std::span<const int64_t> mesh_shape) {
    Placements of_channels(inputs[input].size(), Replicate());
    for (std::size_t i = 0; i < of_channels.size(); ++i) {
      const Placement& p = inputs[input][i];
      if (p.is_shard() && p.tensor_dim() == 1) of_channels[i] = p.on(0);
    }
    return std::all_of(found.begin(), found.end(),
                       [&](const ViewGroup& group) { return same_elements(group, of_channels, mesh_shape); });
  };
}

// (input, weight, bias) -> (result, mean, rstd)
OpRule group_norm(const OpCall& call) {
  const Labels labels = group_labels(call);
  const Labels channel = labels.substr(1);
  const Labels input = with_rest(labels, call.inputs.at(0));
  OpRule rule{.strategies = shard_factors({input, channel, channel}, {input, labels, labels})};
  const TensorInfo statistics{.sizes = {call.arg("N").toInt(), call.arg("group").toInt()},
                              .dtype = statistics_type(call)};
  rule.outputs = {call.inputs[0], statistics, statistics};
  keep_groups(rule, call, 0);
  return rule;
}

// (grad, input, mean, rstd, weight) -> the gradients of input, weight and bias
OpRule group_norm_backward(const OpCall& call) {
  const Labels statistics = group_labels(call);
  const Labels channel = statistics.substr(1);
  const Labels input = with_rest(statistics, call.inputs.at(1));
  OpRule rule{.strategies = shard_factors({input, input, statistics, statistics, channel}, {input, channel, channel})};
  const at::ScalarType type = call.inputs.at(4).defined ? call.inputs[4].dtype : call.inputs.at(1).dtype;
  const TensorInfo of_channels{.sizes = {call.arg("C").toInt()}, .dtype = type};
  rule.outputs = asked_for(call, {call.inputs[1], of_channels, of_channels});
  keep_groups(rule, call, 1);
  return rule;
}

// ---- batch norm with given statistics

// Maps (input, weight, bias, running mean, running variance) to the result and two buffers that nobody reads. On the
// CPU these are empty; a GPU's kernel copies the given statistics into them.
OpRule batch_norm(const OpCall& call) {
  if (call.has_arg("training") && call.arg("training").toBool()) return no_rule();
  const Labels input = labels_of(call.inputs.at(0));
  if (input.size() < 2) return no_rule();
  const Labels channel = input.substr(1, 1);
  const bool empty = call.device == c10::DeviceType::CPU;
  const Labels buffers = empty ? Labels("-") : channel;
  OpRule rule{.strategies = shard_factors({input, channel, channel, channel, channel}, {input, buffers, buffers})};
  for (Strategy& strategy : rule.strategies) {
    for (const std::size_t k : {1, 2}) {
      if (empty || !strategy.outputs[k].is_shard()) strategy.outputs[k] = Replicate();
    }
  }
  if (!empty) rule.kernel = "norm_by_statistics";
  const TensorInfo buffer{.sizes = {empty ? 0 : call.inputs[0].sizes[1]}, .dtype = statistics_type(call)};
  rule.outputs = {call.inputs[0], buffer, buffer};
  return rule;
}

// ---- norms of every slice along one dimension, each of which is scaled by its own norm

OpRule renorm(const OpCall& call) {
  const int64_t dim = call.dim("dim", call.inputs.at(0).ndim());
  Labels labels(call.inputs[0].sizes.size(), '-');
  labels[static_cast<std::size_t>(dim)] = 'k';
  OpRule rule{.strategies = shard_factors({labels}, {labels})};
  rule.outputs = {call.inputs[0]};
  return rule;
}

// Maps (v, g) to (result, norms).
OpRule weight_norm(const OpCall& call) {
  const int64_t dim = call.dim("dim", call.inputs.at(0).ndim());
  Labels v(call.inputs[0].sizes.size(), '-');
  Labels g(call.inputs.at(1).sizes.size(), '-');
  v.at(static_cast<std::size_t>(dim)) = 'k';
  std::vector<int64_t> of_norms(v.size(), 1);
  of_norms[static_cast<std::size_t>(dim)] = call.inputs[0].sizes[static_cast<std::size_t>(dim)];
  if (call.inputs[1].sizes != of_norms || at::isReducedFloatingType(call.inputs[1].dtype)) return no_rule();
  g[static_cast<std::size_t>(dim)] = 'k';
  OpRule rule{.strategies = shard_factors({v, g}, {v, g}), .kernel = "contiguous"};
  rule.outputs = {call.inputs[0], call.inputs[1]};
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"native_layer_norm", layer_norm},
    {"native_layer_norm_backward", layer_norm_backward},
    {"_fused_rms_norm", rms_norm},
    {"_fused_rms_norm_backward", rms_norm_backward},
    {"native_group_norm", group_norm},
    {"native_group_norm_backward", group_norm_backward},
    {"native_batch_norm", batch_norm},
    {"_native_batch_norm_legit", batch_norm},
    {"_native_batch_norm_legit_no_training", batch_norm},
    {"renorm", renorm},
    {"_weight_norm_interface", weight_norm},
};

}  // namespace

std::span<const RuleEntry> norm_rules() { return kTable; }

}  // namespace tessera::rules

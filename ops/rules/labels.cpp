#include "tessera/ops/rules/labels.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>
#include <numeric>

#include <ATen/ExpandUtils.h>

namespace tessera::rules {

Labels broadcast_labels(const std::vector<int64_t>& sizes, const std::vector<int64_t>& whole, const Labels& labels) {
  Labels out(sizes.size(), '-');
  if (sizes.size() > whole.size()) return out;
  const std::size_t skipped = whole.size() - sizes.size();
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == whole[skipped + d]) out[d] = labels[skipped + d];
  }
  return out;
}

std::vector<int64_t> broadcast_sizes(const std::vector<TensorInfo>& inputs) {
  std::vector<int64_t> out;
  for (const TensorInfo& input : inputs) {
    if (!input.defined) continue;
    if (input.sizes.size() > out.size()) out.insert(out.begin(), input.sizes.size() - out.size(), 1);
    const std::size_t skipped = out.size() - input.sizes.size();
    for (std::size_t d = 0; d < input.sizes.size(); ++d) {
      if (input.sizes[d] != 1) out[skipped + d] = input.sizes[d];
    }
  }
  return out;
}

bool broadcasts(const TensorInfo& input, const std::vector<int64_t>& whole) {
  return !input.defined || at::is_expandable_to(input.sizes, whole);
}

Labels with_whole(Labels labels, std::span<const int64_t> dims) {
  for (const int64_t d : dims) {
    if (d >= 0 && d < static_cast<int64_t>(labels.size())) labels[static_cast<std::size_t>(d)] = '-';
  }
  return labels;
}

Labels without(const Labels& labels, std::span<const int64_t> dims) {
  Labels out;
  for (std::size_t d = 0; d < labels.size(); ++d) {
    if (std::find(dims.begin(), dims.end(), static_cast<int64_t>(d)) == dims.end()) out += labels[d];
  }
  return out;
}

namespace {

// Says how great the numbers of a floating dtype may be: those of float16 and float8, of float32 and bfloat16, or of
// float64.
enum class Range : uint8_t { kShort, kUsual, kWide };
Range range_of(at::ScalarType type) {
  const at::ScalarType real = c10::toRealValueType(type);
  if (real == at::kDouble) return Range::kWide;
  return c10::isReducedFloatingType(real) && real != at::kBFloat16 ? Range::kShort : Range::kUsual;
}

}  // namespace

bool converts_termwise(at::ScalarType from, at::ScalarType to) {
  if (from == at::kBool) return false;
  if (from == to) return true;
  const auto floating = [](at::ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); };
  if (!floating(from) || !floating(to)) return false;
  if (c10::toRealValueType(from) == c10::toRealValueType(to)) return true;
  return range_of(to) != Range::kShort && range_of(to) >= range_of(from);
}

void add_linear_where_exact(OpRule& rule, const OpCall& call, const std::vector<std::vector<std::size_t>>& groups) {
  const at::ScalarType to = call.outputs.empty() ? call.inputs.at(0).dtype : call.outputs[0].dtype;
  for (const auto& group : groups) {
    const bool exact = std::all_of(group.begin(), group.end(),
                                   [&](std::size_t i) { return converts_termwise(call.inputs.at(i).dtype, to); });
    if (exact) add_linear(rule, call.inputs.size(), num_outputs(call), {group});
  }
}

Labels labels_of(const TensorInfo& info) { return letters(info.sizes.size()); }

OpRule moved(const OpCall& call, const std::vector<Labels>& inputs, const Labels& output) {
  OpRule rule{.strategies = shard_factors(inputs, std::vector<Labels>(num_outputs(call), output))};
  add_movement(rule, call.inputs.size(), num_outputs(call));
  return rule;
}

OpRule whole_dims(const OpCall& call, const std::vector<int64_t>& whole) {
  const Labels labels = with_whole(labels_of(call.inputs.at(0)), whole);
  return moved(call, {labels}, labels);
}

void add_joint(OpRule& rule, const OpCall& call) {
  std::vector<std::size_t> all(call.inputs.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const auto differs = [&](const TensorInfo& info) { return info.dtype != call.inputs[0].dtype; };
  if (std::ranges::any_of(call.inputs, differs) || std::ranges::any_of(call.outputs, differs)) return;
  for (const ReduceOp op : kPlainReductions)
    rule.strategies.push_back(pass_partial(all.size(), num_outputs(call), all, op));
}

namespace {

// Returns whether terms that all equal `number` can be summed without overflow before the sum is divided by their
// count.
bool averages(double number, at::ScalarType type) {
  constexpr double kMostRanks = 1 << 20;
  const double greatest = c10::toRealValueType(type) == at::kDouble
                              ? std::numeric_limits<double>::max()
                              : static_cast<double>(std::numeric_limits<float>::max());
  return !std::isfinite(number) || std::abs(number) <= greatest / kMostRanks;
}

}  // namespace

void add_filled(OpRule& rule, const OpCall& call, const at::Scalar& value) {
  const double number = value.isComplex() ? std::abs(value.toComplexDouble()) : value.toDouble();
  std::vector<ReduceOp> ops = {ReduceOp::kMax, ReduceOp::kMin};
  if (averages(number, call.inputs.at(0).dtype)) ops.push_back(ReduceOp::kAvg);
  if (number == 0 || (std::isinf(number) && !value.isComplex())) ops.push_back(ReduceOp::kSum);
  for (const ReduceOp op : ops) rule.strategies.push_back(pass_partial(call.inputs.size(), num_outputs(call), {0}, op));
}

int64_t at_dim(const OpCall& call, std::string_view name, std::size_t d, int64_t otherwise) {
  if (!call.has_arg(name)) return otherwise;
  const std::vector<int64_t> values = call.arg(name).toIntVector();
  if (values.empty()) return otherwise;
  return values[std::min(d, values.size() - 1)];
}

OpRule along_dim(const OpCall& call) {
  const std::vector<int64_t> dim = {call.dim("dim", ndim(call))};
  const Labels labels = with_whole(labels_of(call.inputs[0]), dim);
  const std::vector<Labels> inputs(call.inputs.size(), labels);
  return {.strategies = shard_factors(inputs, std::vector<Labels>(num_outputs(call), labels))};
}

bool writes_in_order(const OpCall& call) { return !call.args[0].toTensor().is_cuda(); }

std::vector<TensorInfo> asked_for(const OpCall& call, std::vector<TensorInfo> gradients) {
  const auto wanted = call.arg("output_mask").toBoolList();
  for (std::size_t k = 0; k < gradients.size(); ++k) gradients[k].defined &= wanted.get(k);
  return gradients;
}

std::size_t num_outputs(const OpCall& call) {
  return call.outputs.empty() ? call.schema.returns().size() : call.outputs.size();
}

}  // namespace tessera::rules

#include <algorithm>

#include <ATen/native/Pool.h>

#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/signature.h"
#include "tessera/ops/rules/view_groups.h"

// This file has the rules of pooling with evenly spaced windows. The leading dimensions may be cut freely; along the
// windows' dimensions ranks exchange halos.
namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

// Returns the windows along the d-th of the last dimensions, from `wide_size` to `narrow_size`.
Window window_of(const OpCall& call, std::size_t d, int64_t wide_size, int64_t narrow_size) {
  const int64_t kernel = at_dim(call, "kernel_size", d, 1);
  return {.wide_size = wide_size,
          .narrow_size = narrow_size,
          .kernel = kernel,
          .stride = at_dim(call, "stride", d, kernel),
          .padding = at_dim(call, "padding", d, 0),
          .dilation = at_dim(call, "dilation", d, 1)};
}

std::vector<TensorInfo> pooled3d(const OpCall& call) {
  TensorInfo out = call.inputs.at(0);
  const std::size_t leading = out.sizes.size() - 3;
  for (std::size_t d = 0; d < 3; ++d) {
    int64_t& size = out.sizes[leading + d];
    const Window w = window_of(call, d, size, 0);
    size = at::native::pooling_output_shape<int64_t>(size, w.kernel, w.padding, w.stride, w.dilation,
                                                     call.arg("ceil_mode").toBool());
  }
  TensorInfo indices = out;
  indices.dtype = at::kLong;
  return {out, indices};
}

std::vector<TensorInfo> as_pooled(const OpCall& call) { return {call.inputs.at(1)}; }

// Means are linear. The gradient of a maximum goes to one position.
constexpr SignatureEntry kPooling[] = {
    {"avg_pool2d", "*-- -> *--", Passes::kLinear},
    {"avg_pool3d", "*--- -> *---", Passes::kLinear},
    {"avg_pool2d_backward", "*--, *-- -> *--", Passes::kLinear},
    {"avg_pool3d_backward", "*---, *--- -> *---", Passes::kLinear},
    {"max_pool2d_with_indices", "*-- -> *--, *--"},
    {"max_pool3d_with_indices", "*--- -> *---, *---", Passes::kNothing, "", pooled3d},
    {"max_pool2d_with_indices_backward", "*--, *--, *-- -> *--", Passes::kLinear},
    {"max_pool3d_with_indices_backward", "*---, *---, *--- -> *---", Passes::kLinear, "", as_pooled},
};

// Adds the strategies that cut the windows' dimensions. The inputs are (self), (grad, self) or (grad, self, indices).
void add_windows(OpRule& rule, const OpCall& call, const Sizes& wide, const Sizes& narrow, bool backward) {
  if (has_zero(wide) || has_zero(narrow)) return;
  const std::size_t count = call.schema.name().find("3d") == std::string::npos ? 2 : 3;
  const std::size_t leading = wide.size() - count;
  Halos halos{.dims = {}, .windows = {}, .inputs = {0}, .wide = !backward};
  if (backward) halos.anchor = 1;
  if (call.inputs.size() == 3) halos.inputs.push_back(2);
  for (std::size_t d = 0; d < count; ++d) {
    halos.dims.push_back(static_cast<int64_t>(leading + d));
    halos.windows.push_back(window_of(call, d, wide[leading + d], narrow[leading + d]));
    const Placement cut = Shard(halos.dims.back());
    rule.strategies.push_back({.inputs = Placements(call.inputs.size(), cut),
                               .outputs = Placements(num_outputs(call), cut),
                               .kernel = "pooling"});
  }
  rule.halos = halos;
  rule.valid = [halos, backward](const std::vector<Placements>& inputs, const std::vector<Placements>& outputs,
                                 std::span<const int64_t> mesh_shape) {
    return computes_ranges(halos, inputs[0], backward ? inputs[1] : outputs[0], mesh_shape);
  };
}

OpRule pooling(const OpCall& call) {
  const std::string key = rule_key(call.schema.name());
  const auto entry = std::ranges::find(kPooling, key, &SignatureEntry::name);
  OpRule rule = rule_of(*entry, call);
  if (rule.declines) return rule;
  rule.kernel = "contiguous";
  const bool backward = key.ends_with("_backward");
  const Sizes& wide = call.inputs.at(backward ? 1 : 0).sizes;
  const Sizes& narrow = backward ? call.inputs[0].sizes : rule.outputs.at(0).sizes;
  add_windows(rule, call, wide, narrow, backward);
  return rule;
}

std::vector<RuleEntry> make_table() {
  std::vector<RuleEntry> table;
  for (const SignatureEntry& entry : kPooling) table.push_back({entry.name, pooling});
  return table;
}

}  // namespace

std::span<const RuleEntry> pooling_rules() {
  static const std::vector<RuleEntry> table = make_table();
  return table;
}

}  // namespace tessera::rules

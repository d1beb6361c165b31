#include <algorithm>
#include <array>
#include <optional>

#include "tessera/ops/rules/labels.h"

// This file has the rules of products of matrices, written as factors: mm is (m k)(k n) -> (m n), and k is summed. Each
// is linear in each operand.
namespace tessera::rules {
namespace {

OpRule product(const std::vector<Labels>& inputs, const Labels& output) {
  OpRule rule{.strategies = shard_factors(inputs, {output})};
  for (std::size_t i = 0; i < inputs.size(); ++i) add_linear(rule, inputs.size(), 1, {{i}});
  return rule;
}

// Says whether two inputs that are multiplied, the first of which is `first`, have one dtype. LibTorch's kernels refuse
// others, but not for a piece without elements.
bool alike(const OpCall& call, std::size_t first = 0) {
  return call.inputs.at(first).dtype == call.inputs.at(first + 1).dtype;
}

OpRule product_of_two(const OpCall& call, const std::vector<Labels>& inputs, const Labels& output) {
  return alike(call) ? product(inputs, output) : no_rule();
}

// Where a product is a term of a sum, its bias must be a term too, so that it is added once.
void with_bias_term(OpRule& rule, std::size_t bias) {
  for (Strategy& strategy : rule.strategies) {
    if (strategy.outputs[0].is_partial()) strategy.inputs[bias] = strategy.outputs[0];
  }
}

// Computes bias + a b.
OpRule plus_product(const OpCall& call, const std::vector<Labels>& operands, const std::vector<int64_t>& sizes,
                    const Labels& output) {
  if (!broadcasts(call.inputs.at(0), sizes) || !alike(call, 1)) return no_rule();
  std::vector<Labels> inputs = operands;
  inputs.insert(inputs.begin(), broadcast_labels(call.inputs.at(0).sizes, sizes, output));
  OpRule rule{.strategies = shard_factors(inputs, {output})};
  with_bias_term(rule, 0);
  add_linear(rule, 3, 1, {{0, 1}, {0, 2}});
  const bool asked = call.has_arg("out_dtype");
  rule.outputs = {{.sizes = sizes, .dtype = asked ? call.arg("out_dtype").toScalarType() : call.inputs[0].dtype}};
  return rule;
}

int64_t size(const OpCall& call, std::size_t input, std::size_t dim) { return call.inputs.at(input).sizes.at(dim); }

OpRule mm(const OpCall& call) { return product_of_two(call, {"mk", "kn"}, "mn"); }
OpRule bmm(const OpCall& call) { return product_of_two(call, {"bmk", "bkn"}, "bmn"); }
OpRule mv(const OpCall& call) { return product_of_two(call, {"mk", "k"}, "m"); }
// LibTorch determines the result's sizes only by running the operator.
OpRule dot(const OpCall& call) {
  if (!alike(call)) return no_rule();
  OpRule rule = product({"k", "k"}, "");
  rule.outputs = {{.sizes = {}, .dtype = call.inputs.at(0).dtype}};
  return rule;
}

OpRule outer(const OpCall&) { return product({"m", "n"}, "mn"); }

OpRule addmm(const OpCall& call) {
  return plus_product(call, {"mk", "kn"}, {size(call, 1, 0), size(call, 2, 1)}, "mn");
}
OpRule baddbmm(const OpCall& call) {
  return plus_product(call, {"bmk", "bkn"}, {size(call, 1, 0), size(call, 1, 1), size(call, 2, 2)}, "bmn");
}
// For a matrix without elements LibTorch returns the bias without broadcasting it, so k is not cut if the bias
// broadcasts.
OpRule addmv(const OpCall& call) {
  OpRule rule = plus_product(call, {"mk", "k"}, {size(call, 1, 0)}, "m");
  if (call.inputs.at(0).sizes == std::vector<int64_t>{size(call, 1, 0)}) return rule;
  std::erase_if(rule.strategies, [](const Strategy& s) { return s.inputs[1].is_shard(1); });
  return rule;
}
OpRule addr(const OpCall& call) { return plus_product(call, {"m", "n"}, {size(call, 1, 0), size(call, 2, 0)}, "mn"); }

// Sums the products of a batch.
OpRule addbmm(const OpCall& call) {
  if (call.inputs.at(0).ndim() > 2) return no_rule();  // LibTorch would resize it in place
  return plus_product(call, {"bmk", "bkn"}, {size(call, 1, 1), size(call, 2, 2)}, "mn");
}

// No input may be pending, since terms of one byte each could overflow.
OpRule int_mm(const OpCall& call) {
  OpRule rule{.strategies = shard_factors({"mk", "kn"}, {"mn"})};
  rule.outputs = {{.sizes = {size(call, 0, 0), size(call, 1, 1)}, .dtype = at::kInt}};
  return rule;
}

// The inputs are (bias, a, b). Nothing may be pending, since an activation follows.
OpRule activated(const OpCall& call) {
  const std::vector<int64_t> sizes = {size(call, 1, 0), size(call, 2, 1)};
  if (!broadcasts(call.inputs.at(0), sizes)) return no_rule();
  const Labels bias = broadcast_labels(call.inputs[0].sizes, sizes, "mn");
  return {.strategies = shard_factors({bias, "mk", "kn"}, {"mn"}, ReduceOp::kSum, "k")};
}

at::ScalarType product_type(const OpCall& call) {
  const c10::IValue& asked = call.arg("out_dtype");
  return asked.isNone() ? call.inputs.at(0).dtype : asked.toScalarType();
}

// The inputs are (a, b, offsets, bias): products per group. A dimension along which the groups follow one another, at
// the given offsets, is not cut.
OpRule grouped_mm(const OpCall& call) {
  const bool stacked = call.inputs.at(0).ndim() == 3;  // it has a dimension for the groups
  const bool other_stacked = call.inputs.at(1).ndim() == 3;
  if (call.inputs.at(3).defined) return no_rule();
  Labels a = stacked ? "gmk" : (other_stacked ? "-k" : "m-");
  Labels b = other_stacked ? "gkn" : (stacked ? "k-" : "-n");
  Labels out = stacked && other_stacked ? "gmn" : (stacked ? "m-" : (other_stacked ? "-n" : "-mn"));
  if (stacked != other_stacked) (stacked ? a : b)[0] = '-';
  OpRule rule{.strategies = shard_factors({a, b, "-", ""}, {out})};
  std::vector<int64_t> sizes = {size(call, 0, stacked ? 1 : 0), size(call, 1, other_stacked ? 2 : 1)};
  if (stacked == other_stacked) sizes.insert(sizes.begin(), stacked ? size(call, 0, 0) : size(call, 2, 0));
  rule.outputs = {{.sizes = std::move(sizes), .dtype = product_type(call)}};
  rule.kernel = "aligned_rows";
  return rule;
}

// The inputs are (a, b, scale of a, scale of b, bias, scale of the result). A scale is one number, or one number per
// row of a or per column of b.
OpRule scaled_mm(const OpCall& call) {
  const std::vector<int64_t> sizes = {size(call, 0, 0), size(call, 1, 1)};
  const auto scale = [&](std::size_t i, const std::vector<int64_t>& rows) -> std::optional<Labels> {
    const TensorInfo& info = call.inputs.at(i);
    if (info.sizes == rows) return broadcast_labels(info.sizes, sizes, "mn");
    const bool one = std::all_of(info.sizes.begin(), info.sizes.end(), [](int64_t n) { return n == 1; });
    return one ? std::make_optional(Labels(info.sizes.size(), '-')) : std::nullopt;
  };
  const auto of_a = scale(2, {sizes[0], 1});
  const auto of_b = scale(3, {1, sizes[1]});
  if (!of_a || !of_b) return no_rule();
  // A term must not be rounded to float8, in which it may be NaN.
  const bool alone = !call.inputs.at(4).defined && !call.inputs.at(5).defined && !c10::isFloat8Type(product_type(call));
  OpRule rule{.strategies =
                  shard_factors({"mk", "kn", *of_a, *of_b, "n", ""}, {"mn"}, ReduceOp::kSum, alone ? "" : "k")};
  rule.outputs = {{.sizes = sizes, .dtype = product_type(call)}};
  return rule;
}

// Returns labels for the leading dimensions of input 0; its last `last` dimensions get labels elsewhere.
Labels leading(const OpCall& call, std::size_t last) { return letters(call.inputs.at(0).sizes.size() - last); }

// (..., k)(k, n) -> (..., n)
OpRule dense(const OpCall& call) {
  const Labels rows = leading(call, 1);
  return product_of_two(call, {rows + 'K', "KN"}, rows + 'N');
}

// (..., k)(k, n) + (n) -> (..., n)
OpRule dense_bias(const OpCall& call) {
  if (!alike(call)) return no_rule();
  const Labels rows = leading(call, 1);
  OpRule rule{.strategies = shard_factors({rows + 'K', "KN", "N"}, {rows + 'N'})};
  with_bias_term(rule, 2);
  add_linear(rule, 3, 1, {{2, 0}, {2, 1}});
  return rule;
}

// (..., k)(..., n) -> (k, n): the gradient of dense's weight, summed over the leading dimensions.
OpRule dense_wgrad(const OpCall& call) {
  const Labels rows = leading(call, 1);
  return product_of_two(call, {rows + 'K', rows + 'N'}, "KN");
}

// (B..., m, k)(B..., k, n) -> (B..., m, n)
OpRule batched_matmul(const OpCall& call) {
  const Labels batch = leading(call, 2);
  return product_of_two(call, {batch + "MK", batch + "KN"}, batch + "MN");
}

// Multiplies three tensors, each expanded in the dimensions that its argument names, and sums over some dimensions.
// bilinear runs it.
OpRule trilinear(const OpCall& call) {
  constexpr std::array kExpanded = {"expand1", "expand2", "expand3"};
  const auto ndim = call.inputs.at(0).ndim() + static_cast<int64_t>(call.arg(kExpanded[0]).toIntVector().size());
  const Labels all = letters(static_cast<std::size_t>(ndim));
  std::vector<Labels> inputs;
  std::vector<int64_t> sizes(all.size(), 1);
  for (std::size_t j = 0; j < kExpanded.size(); ++j) {
    inputs.push_back(without(all, call.dims(kExpanded[j], ndim)));
    for (std::size_t d = 0; d < inputs[j].size(); ++d) {
      int64_t& size = sizes[static_cast<std::size_t>(inputs[j][d] - all[0])];
      size = std::max(size, call.inputs.at(j).sizes.at(d));
    }
  }
  for (std::size_t j = 0; j < inputs.size(); ++j) {
    for (std::size_t d = 0; d < inputs[j].size(); ++d) {
      if (call.inputs[j].sizes[d] != sizes[static_cast<std::size_t>(inputs[j][d] - all[0])]) return no_rule();
    }
  }
  return product(inputs, without(all, call.dims("sumdim", ndim)));
}

constexpr RuleEntry kTable[] = {
    {"mm", mm},
    {"_trilinear", trilinear},
    {"bmm", bmm},
    {"mv", mv},
    {"dot", dot},
    {"vdot", dot},
    {"outer", outer},
    {"addmm", addmm},
    {"baddbmm", baddbmm},
    {"addmv", addmv},
    {"addr", addr},
    {"addbmm", addbmm},
    {"_int_mm", int_mm},
    {"_addmm_activation", activated},
    {"_grouped_mm", grouped_mm},
    {"_scaled_mm", scaled_mm},
    {"tessera::dense", dense},
    {"tessera::dense_bias", dense_bias},
    {"tessera::dense_wgrad", dense_wgrad},
    {"tessera::batched_matmul", batched_matmul},
};

}  // namespace

std::span<const RuleEntry> matmul_rules() { return kTable; }

}  // namespace tessera::rules

#include "tessera/ops/rules/labels.h"

// Products of matrices, each written as factors: mm is (m k)(k n) -> (m n), k summed. Linear in each operand alone.
namespace tessera::rules {
namespace {

OpRule product(const std::vector<Labels>& inputs, const Labels& output) {
  OpRule rule{.strategies = shard_factors(inputs, {output})};
  for (std::size_t i = 0; i < inputs.size(); ++i) add_linear(rule, inputs.size(), 1, {{i}});
  return rule;
}

// bias + a b: where the product is a term of a sum, the bias has to be one too, lest it be added once a term.
OpRule plus_product(const OpCall& call, const std::vector<Labels>& operands, const std::vector<int64_t>& sizes,
                    const Labels& output) {
  std::vector<Labels> inputs = operands;
  inputs.insert(inputs.begin(), broadcast_labels(call.inputs.at(0).sizes, sizes, output));
  OpRule rule{.strategies = shard_factors(inputs, {output})};
  for (Strategy& strategy : rule.strategies) {
    if (strategy.outputs[0].is_partial()) strategy.inputs[0] = strategy.outputs[0];
  }
  add_linear(rule, 3, 1, {{0, 1}, {0, 2}});
  return rule;
}

int64_t size(const OpCall& call, std::size_t input, std::size_t dim) { return call.inputs.at(input).sizes.at(dim); }

OpRule mm(const OpCall&) { return product({"mk", "kn"}, "mn"); }
OpRule bmm(const OpCall&) { return product({"bmk", "bkn"}, "bmn"); }
OpRule mv(const OpCall&) { return product({"mk", "k"}, "m"); }
// LibTorch tells no sizes of it without running it.
OpRule dot(const OpCall& call) {
  OpRule rule = product({"k", "k"}, "");
  rule.outputs = {{.sizes = {}, .dtype = call.inputs.at(0).dtype}};
  return rule;
}

OpRule outer(const OpCall&) { return product({"m", "n"}, "mn"); }

OpRule addmm(const OpCall& call) { return plus_product(call, {"mk", "kn"}, {size(call, 1, 0), size(call, 2, 1)}, "mn"); }
OpRule baddbmm(const OpCall& call) {
  return plus_product(call, {"bmk", "bkn"}, {size(call, 1, 0), size(call, 1, 1), size(call, 2, 2)}, "bmn");
}
// Of a matrix without elements LibTorch gives the bias as it is, not broadcast: a broadcast one needs k whole.
OpRule addmv(const OpCall& call) {
  OpRule rule = plus_product(call, {"mk", "k"}, {size(call, 1, 0)}, "m");
  if (call.inputs.at(0).sizes == std::vector<int64_t>{size(call, 1, 0)}) return rule;
  std::erase_if(rule.strategies, [](const Strategy& s) { return s.inputs[1].is_shard(1); });
  return rule;
}
OpRule addr(const OpCall& call) { return plus_product(call, {"m", "n"}, {size(call, 1, 0), size(call, 2, 0)}, "mn"); }

// The leading dimensions' labels, of a tensor whose last `last` ones have names of their own.
Labels leading(const OpCall& call, std::size_t last) { return letters(call.inputs.at(0).sizes.size() - last); }

// (..., k)(k, n) -> (..., n)
OpRule dense(const OpCall& call) {
  const Labels rows = leading(call, 1);
  return product({rows + 'K', "KN"}, rows + 'N');
}

// (..., k)(..., n) -> (k, n): the gradient of dense's weight, summed over the leading dimensions.
OpRule dense_wgrad(const OpCall& call) {
  const Labels rows = leading(call, 1);
  return product({rows + 'K', rows + 'N'}, "KN");
}

// (B..., m, k)(B..., k, n) -> (B..., m, n)
OpRule batched_matmul(const OpCall& call) {
  const Labels batch = leading(call, 2);
  return product({batch + "MK", batch + "KN"}, batch + "MN");
}

constexpr RuleEntry kTable[] = {
    {"mm", mm},
    {"bmm", bmm},
    {"mv", mv},
    {"dot", dot},
    {"vdot", dot},
    {"outer", outer},
    {"addmm", addmm},
    {"baddbmm", baddbmm},
    {"addmv", addmv},
    {"addr", addr},
    {"tessera::dense", dense},
    {"tessera::dense_wgrad", dense_wgrad},
    {"tessera::batched_matmul", batched_matmul},
};

}  // namespace

std::span<const RuleEntry> matmul_rules() { return kTable; }

}  // namespace tessera::rules

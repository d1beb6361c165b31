#include <algorithm>
#include <initializer_list>
#include <optional>

#include "tessera/ops/rules/labels.h"

// This file has the rules of softmax, embeddings, losses, attention and recurrent cells.
namespace tessera::rules {
namespace {

// LibTorch has no meta kernels for several operators here, so their rules compute the results' shapes.
TensorInfo info(std::vector<int64_t> sizes, at::ScalarType dtype) {
  return {.sizes = std::move(sizes), .dtype = dtype};
}

// ---- softmax and other operators that work along one dimension of all their tensors

// Where the dimension is cut, the kernel joins numbers of all pieces: so many of each line.
void add_joined(OpRule& rule, const OpCall& call, std::string_view kernel, int numbers) {
  const int64_t dim = call.dim("dim", ndim(call));
  for (const TensorInfo& input : call.inputs) {
    if (!at::isFloatingType(input.dtype) || c10::elementSize(input.dtype) == 1) return;
    if (input.sizes != call.inputs[0].sizes) return;  // LibTorch refuses it
  }
  const TensorInfo& first = call.inputs[0];
  const int64_t numel = c10::multiply_integers(first.sizes);
  if (first.ndim() == 0 || numel == 0) return;
  const auto lines = static_cast<double>(numel / first.sizes[static_cast<std::size_t>(dim)]);
  const double bytes = lines * numbers * (first.dtype == at::kDouble ? 8 : 4);
  rule.strategies.push_back({.inputs = std::vector(call.inputs.size(), Shard(dim)),
                             .outputs = {Shard(dim)},
                             .kernel = kernel,
                             .joined = Strategy::Joined{.reduced = bytes}});
}

OpRule softmax(const OpCall& call) {
  OpRule rule = along_dim(call);
  add_joined(rule, call, "softmax", 2);
  return rule;
}

OpRule safe_softmax(const OpCall& call) {
  OpRule rule = softmax(call);
  const auto& dtype = call.arg("dtype");
  rule.outputs = {info(call.inputs.at(0).sizes, dtype.isNone() ? call.inputs[0].dtype : dtype.toScalarType())};
  return rule;
}

OpRule along_backward(const OpCall& call) {
  OpRule rule = along_dim(call);
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

OpRule softmax_backward(const OpCall& call) {
  OpRule rule = along_backward(call);
  add_joined(rule, call, "softmax_backward", 1);
  return rule;
}

// (grad, self)
OpRule glu_backward(const OpCall& call) {
  OpRule rule = along_backward(call);
  rule.outputs = {call.inputs.at(1)};
  return rule;
}

// ---- embedding: V labels the vocabulary, H the width

// The inputs are (weight, indices). A part of the vocabulary gives terms, which are zero for indices outside it.
OpRule embedding(const OpCall& call) {
  const Labels indices = letters(call.inputs.at(1).sizes.size());
  // A sum of bool is not defined; its maximum is true where any term is.
  const ReduceOp of_terms = call.inputs[0].dtype == at::kBool ? ReduceOp::kMax : ReduceOp::kSum;
  OpRule rule{.strategies = shard_factors({"VH", indices}, {indices + 'H'}, of_terms)};
  for (Strategy& strategy : rule.strategies) {
    if (strategy.inputs[0] == Shard(0)) strategy.kernel = "embedding";
  }
  add_movement(rule, 2, 1);
  std::vector<int64_t> sizes = call.inputs[1].sizes;
  sizes.push_back(call.inputs[0].sizes.at(1));
  rule.outputs = {info(std::move(sizes), call.inputs[0].dtype)};
  return rule;
}

// The inputs are (grad, indices). Pieces of the indices give terms of every row. Scaling by how often an index occurs
// needs all indices.
OpRule embedding_dense_backward(const OpCall& call) {
  const Labels indices = letters(call.inputs.at(1).sizes.size());
  const bool needs_all = call.arg("scale_grad_by_freq").toBool();
  OpRule rule{.strategies =
                  shard_factors({indices + 'H', indices}, {"VH"}, ReduceOp::kSum, needs_all ? indices : Labels())};
  for (Strategy& strategy : rule.strategies) {
    if (strategy.outputs[0] == Shard(0)) strategy.kernel = "embedding_dense_backward";
  }
  // The strategy that computes rows from replicated inputs comes last, after those with a pending gradient.
  add_linear(rule, 2, 1, {{0}});
  std::stable_partition(rule.strategies.begin(), rule.strategies.end(),
                        [](const Strategy& s) { return s.kernel.empty(); });
  const TensorInfo& grad = call.inputs[0];
  rule.outputs = {info({call.arg("num_weights").toInt(), grad.sizes.back()}, grad.dtype)};
  return rule;
}

// ---- negative log likelihood: self (n, classes, rest...), target (n, rest...)

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

struct NllLabels {
  Labels self;
  Labels target;
};

NllLabels nll_labels(const TensorInfo& self) {
  if (self.ndim() < 2) return {.self = Labels(self.sizes.size(), '-'), .target = ""};
  const Labels rest = letters(self.sizes.size() - 2);
  return {.self = "N-" + rest, .target = 'N' + rest};
}

// Says whether LibTorch's kernels take the dtypes of (self, target, weight). For a piece without elements they do not
// ask.
bool takes_types(const TensorInfo& self, const TensorInfo& target, const TensorInfo& weight) {
  const bool classes = target.dtype == at::kLong || (target.dtype == at::kByte && self.ndim() <= 2);
  return classes && (!weight.defined || weight.dtype == self.dtype);
}

// Returns the cut of the classes, or nullopt where there are none or LibTorch refuses the sizes.
std::optional<Placement> cut_of_classes(const OpCall& call, std::size_t first) {
  const TensorInfo &self = call.inputs.at(first), &target = call.inputs.at(first + 1);
  const TensorInfo& weight = call.inputs.at(first + 2);
  const bool spatial = call.schema.name().find("nll_loss2d") != std::string::npos;
  const bool takes_ndim = spatial ? self.ndim() == 4 : self.ndim() == 1 || self.ndim() == 2;
  const bool floating = at::isFloatingType(self.dtype) && c10::elementSize(self.dtype) > 1;
  if (!takes_ndim || !floating || !takes_types(self, target, weight)) return std::nullopt;
  if (c10::multiply_integers(self.sizes) == 0) return std::nullopt;
  const int64_t classes = self.ndim() == 1 ? 0 : 1;
  std::vector<int64_t> items = self.sizes;
  items.erase(items.begin() + classes);
  const std::vector<int64_t> weights = {self.sizes[static_cast<std::size_t>(classes)]};
  if (target.sizes != items || (weight.defined && weight.sizes != weights)) return std::nullopt;
  return Shard(classes);
}

// Maps (self, target, weight) to (loss, total weight). A mean is divided by the total weight of all pieces. Pieces of
// the classes give terms, since one rank has an element's class.
OpRule nll_forward(const OpCall& call) {
  const auto [self, target] = nll_labels(call.inputs.at(0));
  if (!takes_types(call.inputs[0], call.inputs.at(1), call.inputs.at(2))) return no_rule();
  const int64_t reduction = call.arg("reduction").toInt();
  OpRule rule{.strategies = shard_factors({self, target, "-"}, {reduction == kNone ? target : Labels(), ""})};
  for (Strategy& strategy : rule.strategies) {
    if (reduction != kSum) strategy.outputs[1] = Replicate();
    if (reduction == kMean) strategy.kernel = "nll_loss";
  }
  if (const auto cut = cut_of_classes(call, 0)) {
    rule.strategies.push_back({.inputs = {*cut, Replicate(), Replicate()},
                               .outputs = {Partial(), Replicate()},
                               .kernel = reduction == kMean ? "nll_loss" : "nll_loss_of_classes",
                               .joined = Strategy::Joined{}});
  }
  const at::ScalarType dtype = call.inputs[0].dtype;
  rule.outputs = {info(reduction == kNone ? call.inputs.at(1).sizes : std::vector<int64_t>(), dtype), info({}, dtype)};
  return rule;
}

// (grad, self, target, weight, total weight)
OpRule nll_backward(const OpCall& call) {
  const auto [self, target] = nll_labels(call.inputs.at(1));
  const int64_t reduction = call.arg("reduction").toInt();
  const Labels grad = reduction == kNone ? target : Labels();
  OpRule rule{.strategies = shard_factors({grad, self, target, "-", ""}, {self})};
  if (reduction == kSum) {
    for (Strategy& strategy : rule.strategies) strategy.inputs[4] = Partial();  // only a mean reads it
  }
  add_linear_where_exact(rule, call, {{0}});
  const auto cut = cut_of_classes(call, 1);
  if (cut && call.inputs[0].sizes == (reduction == kNone ? call.inputs[2].sizes : std::vector<int64_t>())) {
    rule.strategies.push_back({.inputs = {Replicate(), *cut, Replicate(), Replicate(), Replicate()},
                               .outputs = {*cut},
                               .kernel = "nll_loss_backward"});
  }
  rule.outputs = {call.inputs[1]};
  return rule;
}

// ---- attention on CPU: query is (b, h, q, e); key and value are (b, h, k, e)

struct AttentionLabels {
  Labels query;
  Labels key;
  Labels mask;
};

AttentionLabels attention_labels(const OpCall& call, const TensorInfo& query, const TensorInfo& key,
                                 const TensorInfo& mask) {
  // With a causal mask the position of a query decides which keys it sees, so q must not be cut.
  Labels labels = call.arg("is_causal").toBool() ? "bh--" : "bhq-";
  if (query.sizes[1] != key.sizes[1]) labels[1] = '-';
  const std::vector<int64_t> scores = {query.sizes[0], query.sizes[1], query.sizes[2], key.sizes[2]};
  if (!broadcasts(mask, scores)) labels = "----";  // LibTorch refuses the mask
  const Labels mask_labels = mask.defined ? broadcast_labels(mask.sizes, scores, labels) : Labels();
  return {.query = labels, .key = labels.substr(0, 2) + "--", .mask = mask_labels};
}

// The statistics have single precision for half types.
at::ScalarType logsumexp_type(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

// (query, key, value, mask) -> (result, logsumexp)
OpRule attention(const OpCall& call) {
  const TensorInfo& query = call.inputs.at(0);
  if (!at::isFloatingType(query.dtype))
    return no_rule();  // the kernel refuses it, but not for a piece without elements
  const auto [q, k, mask] = attention_labels(call, query, call.inputs.at(1), call.inputs.at(3));
  OpRule rule{.strategies = shard_factors({q, k, k, mask}, {q, q.substr(0, 3)})};
  std::vector<int64_t> sizes = query.sizes;
  rule.outputs.push_back(info(sizes, query.dtype));
  sizes.pop_back();
  rule.outputs.push_back(info(sizes, logsumexp_type(query.dtype)));
  return rule;
}

// The inputs are (grad, query, key, value, result, logsumexp, mask). Pieces of the queries give terms of the gradients
// of key and value.
OpRule attention_backward(const OpCall& call) {
  const auto& in = call.inputs;
  const auto [q, k, mask] = attention_labels(call, in.at(1), in.at(2), in.at(6));
  OpRule rule{.strategies = shard_factors({q, q, k, k, q, q.substr(0, 3), mask}, {q, k, k})};
  for (const std::size_t i : {1, 2, 3}) rule.outputs.push_back(in[i]);
  rule.kernel = "attention_backward";
  return rule;
}

// ---- cells of recurrent layers, which a GPU computes by one kernel: b labels the batch. A state may not be cut, since
// its gates lie side by side.

TensorInfo wider(const TensorInfo& info, int64_t times) {
  TensorInfo out = info;
  out.sizes.at(1) *= times;
  return out;
}
TensorInfo bias_of(const TensorInfo& gates, bool defined) {
  return {.sizes = {gates.sizes.at(1)}, .dtype = gates.dtype, .defined = defined};
}

// Says whether inputs that are there are matrices of as many rows; others are left to LibTorch's errors.
bool are_batches(const OpCall& call, std::initializer_list<std::size_t> inputs) {
  std::optional<int64_t> rows;
  for (const std::size_t i : inputs) {
    const TensorInfo& input = call.inputs.at(i);
    if (!input.defined) continue;
    if (input.sizes.size() != 2 || input.sizes[0] != rows.value_or(input.sizes[0])) return false;
    rows = input.sizes[0];
  }
  return true;
}

// (gates of the input, gates of the state, state, biases of both) -> (state, what backward needs)
OpRule gru_cell(const OpCall& call) {
  if (!are_batches(call, {0, 1, 2})) return no_rule();
  OpRule rule{.strategies = shard_factors({"b-", "b-", "b-", "-", "-"}, {"b-", "b-"})};
  rule.outputs = {call.inputs.at(2), wider(call.inputs[2], 5)};
  return rule;
}

// (grad, what forward left) -> the gradients of the five inputs
OpRule gru_cell_backward(const OpCall& call) {
  if (!are_batches(call, {0, 1})) return no_rule();
  OpRule rule{.strategies = shard_factors({"b-", "b-"}, {"b-", "b-", "b-", "-", "-"})};
  const TensorInfo gates = wider(call.inputs.at(0), 3), bias = bias_of(gates, call.arg("has_bias").toBool());
  rule.outputs = {gates, gates, call.inputs[0], bias, bias};
  return rule;
}

// (gates of the input, gates of the state, cell, biases of both) -> (state, cell, what backward needs)
OpRule lstm_cell(const OpCall& call) {
  if (!are_batches(call, {0, 1, 2})) return no_rule();
  OpRule rule{.strategies = shard_factors({"b-", "b-", "b-", "-", "-"}, {"b-", "b-", "b-"})};
  rule.outputs = {call.inputs.at(2), call.inputs[2], call.inputs.at(0)};
  return rule;
}

// (grads of state and cell, cell before and after, what forward left) -> the gradients of gates, cell and bias
OpRule lstm_cell_backward(const OpCall& call) {
  if (!are_batches(call, {0, 1, 2, 3, 4})) return no_rule();
  OpRule rule{.strategies = shard_factors({"b-", "b-", "b-", "b-", "b-"}, {"b-", "b-", "-"})};
  const TensorInfo& gates = call.inputs.at(4);
  rule.outputs = {gates, call.inputs[2], bias_of(gates, call.arg("has_bias").toBool())};
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"_softmax", softmax},
    {"_log_softmax", softmax},
    {"_safe_softmax", safe_softmax},
    {"glu", along_dim},
    {"_softmax_backward_data", softmax_backward},
    {"_log_softmax_backward_data", softmax_backward},
    {"glu_backward", glu_backward},
    {"embedding", embedding},
    {"embedding_dense_backward", embedding_dense_backward},
    {"nll_loss_forward", nll_forward},
    {"nll_loss2d_forward", nll_forward},
    {"nll_loss_backward", nll_backward},
    {"nll_loss2d_backward", nll_backward},
    {"_thnn_fused_gru_cell", gru_cell},
    {"_thnn_fused_gru_cell_backward", gru_cell_backward},
    {"_thnn_fused_lstm_cell", lstm_cell},
    {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"_scaled_dot_product_flash_attention_for_cpu", attention},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward},
};

}  // namespace

std::span<const RuleEntry> nn_rules() { return kTable; }

}  // namespace tessera::rules

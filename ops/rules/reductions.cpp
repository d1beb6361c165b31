#include <algorithm>
#include <numeric>

#include "tessera/ops/rules/labels.h"

// Operators that make one element of many, and those that work along one dimension.
namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

// What a reduction's arguments say: its input's labels and its results'.
struct Reduced {
  Labels input;
  Labels output;
  bool everything;  // all dimensions into one element
};

Sizes every_dim(int64_t ndim) {
  Sizes out(static_cast<std::size_t>(ndim));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

// No dimension named means all of them.
Reduced read(const OpCall& call) {
  const int64_t ndim = call.inputs.at(0).ndim();
  Sizes dims = call.has_arg("dim") ? call.dims("dim", ndim) : Sizes{};
  const bool everything = dims.empty();
  if (everything) dims = every_dim(ndim);
  const Labels input = letters(static_cast<std::size_t>(ndim));
  const bool keeps = call.has_arg("keepdim") && call.arg("keepdim").toBool();
  return {.input = input, .output = keeps ? with_whole(input, dims) : without(input, dims), .everything = everything};
}

Sizes reduced_sizes(const OpCall& call) {
  const Reduced reduced = read(call);
  const Sizes& sizes = call.inputs.at(0).sizes;
  Sizes out;
  for (const char label : reduced.output) out.push_back(label == '-' ? 1 : sizes[static_cast<std::size_t>(label - 'a')]);
  return out;
}

Labels keep_common(const Labels& input, const Labels& output) {
  Labels out = input;
  for (char& label : out) {
    if (output.find(label) == Labels::npos) label = '-';
  }
  return out;
}

// Pieces of the reduced dimensions give terms of the result; `kernel` computes a term where the operator would not.
OpRule by_terms(const OpCall& call, ReduceOp op, std::string_view kernel = {}) {
  const Reduced reduced = read(call);
  OpRule rule{.strategies = shard_factors({reduced.input}, {reduced.output}, op)};
  for (Strategy& strategy : rule.strategies) {
    if (strategy.outputs[0].is_partial()) strategy.kernel = kernel;
  }
  return rule;
}

// any(x, dim=[]) reduces nothing, unlike every other operator here.
bool names_no_dim(const OpCall& call) {
  return call.has_arg("dim") && call.arg("dim").isIntList() && call.arg("dim").toIntVector().empty();
}

OpRule sum(const OpCall& call) {
  OpRule rule = by_terms(call, ReduceOp::kSum);
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

OpRule mean(const OpCall& call) {
  OpRule rule = by_terms(call, ReduceOp::kSum, "mean");
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

OpRule count(const OpCall& call) { return by_terms(call, ReduceOp::kSum); }

// The reduced dimensions whole: every other one passes.
OpRule whole(const OpCall& call) {
  const Reduced reduced = read(call);
  if (reduced.everything) return {};
  const Labels input = keep_common(reduced.input, reduced.output);
  return {.strategies = shard_factors({input}, std::vector<Labels>(num_outputs(call), reduced.output))};
}

// LibTorch tells no sizes of these without running them.
OpRule spread(const OpCall& call) {
  OpRule rule = whole(call);
  const TensorInfo& in = call.inputs.at(0);
  TensorInfo out{.sizes = reduced_sizes(call), .dtype = in.dtype};
  rule.outputs = {out, out};
  rule.outputs[0].dtype = c10::toRealValueType(in.dtype);
  return rule;
}

// A reduction whose terms reduce by itself: those of a pending one of the same kind pass.
template <ReduceOp op>
OpRule idempotent(const OpCall& call) {
  if (names_no_dim(call)) return {};
  OpRule rule = by_terms(call, op);
  rule.strategies.push_back(pass_partial(1, 1, {0}, op));
  return rule;
}

template <ReduceOp op>
OpRule extremum(const OpCall& call) {
  OpRule rule = by_terms(call, op, "extremum");
  rule.strategies.push_back(pass_partial(1, 1, {0}, op));
  return rule;
}

// max(x) is an extremum, max(x, dim) says where it is as well, max(x, y) is composite.
template <ReduceOp op>
OpRule extremum_or_indices(const OpCall& call) {
  if (call.inputs.size() != 1) return {};
  return call.has_arg("dim") ? whole(call) : extremum<op>(call);
}

// terms multiply
OpRule product(const OpCall& call) {
  OpRule rule = by_terms(call, ReduceOp::kProduct);
  const at::ScalarType to = call.outputs.empty() ? call.inputs.at(0).dtype : call.outputs[0].dtype;
  if (converts_termwise(call.inputs.at(0).dtype, to)) rule.strategies.push_back(pass_partial(1, 1, {0}, ReduceOp::kProduct));
  return rule;
}

// Results as long as the input (or another length along `dim`), whole there.
OpRule along(const OpCall& call) {
  const int64_t ndim = call.inputs.at(0).ndim();
  const Sizes dim = {call.dim("dim", ndim)};
  const Labels labels = with_whole(letters(static_cast<std::size_t>(ndim)), dim);
  return {.strategies = shard_factors({labels}, std::vector<Labels>(num_outputs(call), labels))};
}

OpRule cumsum(const OpCall& call) {
  OpRule rule = along(call);
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"sum", sum},
    {"nansum", count},
    {"count_nonzero", count},
    {"mean", mean},
    {"prod", product},
    {"amax", extremum<ReduceOp::kMax>},
    {"amin", extremum<ReduceOp::kMin>},
    {"max", extremum_or_indices<ReduceOp::kMax>},
    {"min", extremum_or_indices<ReduceOp::kMin>},
    {"any", idempotent<ReduceOp::kMax>},
    {"all", idempotent<ReduceOp::kMin>},
    {"argmax", whole},
    {"argmin", whole},
    {"aminmax", whole},
    {"var", whole},
    {"std", whole},
    {"var_mean", spread},
    {"std_mean", spread},
    {"logsumexp", whole},
    {"norm", whole},
    {"linalg_vector_norm", whole},
    {"median", whole},
    {"nanmedian", whole},
    {"kthvalue", whole},
    {"mode", whole},
    {"cumsum", cumsum},
    {"cumprod", along},
    {"logcumsumexp", along},
    {"cummax", along},
    {"cummin", along},
    {"topk", along},
    {"sort", along},
    {"argsort", along},
};

}  // namespace

std::span<const RuleEntry> reduction_rules() { return kTable; }

}  // namespace tessera::rules

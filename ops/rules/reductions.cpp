#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "tessera/ops/rules/labels.h"

// This file has the rules of operators that reduce many elements to one, and of those that work along one dimension.
namespace tessera::rules {
namespace {

// LibTorch determines the results of some of these operators only by running them, so the rules compute them: values,
// and indices if there are two results.

using Sizes = std::vector<int64_t>;

// Holds the labels of a reduction's input and results, read from its arguments.
struct Reduced {
  Labels input;
  Labels output;
  bool everything;  // all dimensions are reduced to one element
};

Sizes every_dim(int64_t ndim) {
  Sizes out(static_cast<std::size_t>(ndim));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

// If no dimension is named, all are reduced.
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
  for (const char label : reduced.output)
    out.push_back(label == '-' ? 1 : sizes[static_cast<std::size_t>(label - 'a')]);
  return out;
}

// Returns the dtype asked for, or else the input's.
at::ScalarType result_type(const OpCall& call) {
  if (call.has_arg("dtype") && !call.arg("dtype").isNone()) return call.arg("dtype").toScalarType();
  return call.inputs.at(0).dtype;
}

// Returns the same for sums, products and counts, which are int64 for integers.
at::ScalarType accumulated_type(const OpCall& call) {
  const at::ScalarType type = result_type(call);
  return at::isIntegralType(type, true) && call.arg("dtype").isNone() ? at::kLong : type;
}

Labels keep_common(const Labels& input, const Labels& output) {
  Labels out = input;
  for (char& label : out) {
    if (output.find(label) == Labels::npos) label = '-';
  }
  return out;
}

// Pieces of the reduced dimensions give terms of the result. `kernel` computes a term where the operator itself would
// not.
OpRule by_terms(const OpCall& call, ReduceOp op, at::ScalarType type, std::string_view kernel = {}) {
  const Reduced reduced = read(call);
  OpRule rule{.strategies = shard_factors({reduced.input}, {reduced.output}, op)};
  rule.outputs = {{.sizes = reduced_sizes(call), .dtype = type}};
  for (Strategy& strategy : rule.strategies) {
    if (strategy.outputs[0].is_partial()) strategy.kernel = kernel;
  }
  // Sums and products of bools cannot be pending.
  if (type == at::kBool && (op == ReduceOp::kSum || op == ReduceOp::kProduct)) {
    std::erase_if(rule.strategies, [](const Strategy& strategy) { return strategy.outputs[0].is_partial(); });
  }
  return rule;
}

// any(x, dim=[]) reduces nothing, unlike every other operator here.
bool names_no_dim(const OpCall& call) {
  return call.has_arg("dim") && call.arg("dim").isIntList() && call.arg("dim").toIntVector().empty();
}

OpRule sum(const OpCall& call) {
  OpRule rule = by_terms(call, ReduceOp::kSum, accumulated_type(call));
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

OpRule mean(const OpCall& call) {
  OpRule rule = by_terms(call, ReduceOp::kSum, result_type(call), "mean");
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

OpRule nansum(const OpCall& call) { return by_terms(call, ReduceOp::kSum, accumulated_type(call)); }
OpRule count_nonzero(const OpCall& call) { return by_terms(call, ReduceOp::kSum, at::kLong); }

// The reduced dimensions must not be cut; the others may be.
OpRule whole(const OpCall& call) {
  const Reduced reduced = read(call);
  if (reduced.everything) return {};
  const Labels input = keep_common(reduced.input, reduced.output);
  return {.strategies = shard_factors({input}, std::vector<Labels>(num_outputs(call), reduced.output))};
}

OpRule with_results(OpRule rule, std::vector<int64_t> sizes, const std::vector<at::ScalarType>& types) {
  for (const at::ScalarType type : types) rule.outputs.push_back({.sizes = sizes, .dtype = type});
  return rule;
}

OpRule whole_with_indices(const OpCall& call) {
  if (num_outputs(call) == 1) return whole(call);    // median(x)
  if (call.has_arg("k") && call.arg("k").isInt()) {  // kthvalue
    const Sizes& sizes = call.inputs.at(0).sizes;
    const int64_t k = call.arg("k").toInt();
    const int64_t most = sizes.empty() ? 1 : sizes[static_cast<std::size_t>(call.dim("dim", std::ssize(sizes)))];
    if (k < 1 || k > most) return no_rule();
  }
  return with_results(whole(call), reduced_sizes(call), {call.inputs.at(0).dtype, at::kLong});
}

// Adds strategies in which a reduced dimension is cut and every result is replicated, for a kernel that joins what
// ranks find in their pieces. `of_line` is what it communicates for each element of a result.
void add_joined(OpRule& rule, const OpCall& call, std::string_view kernel, const Strategy::Joined& of_line) {
  const Reduced reduced = read(call);
  const Sizes& sizes = call.inputs.at(0).sizes;
  if (std::ranges::find(sizes, 0) != sizes.end()) return;  // LibTorch throws its own error, or nothing is reduced
  const auto lines = static_cast<double>(c10::multiply_integers(reduced_sizes(call)));
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (reduced.output.find(reduced.input[d]) != Labels::npos) continue;
    rule.strategies.push_back(
        {.inputs = {Shard(static_cast<int64_t>(d))},
         .outputs = std::vector<Placement>(num_outputs(call), Replicate()),
         .kernel = kernel,
         .joined = Strategy::Joined{.reduced = of_line.reduced * lines, .gathered = of_line.gathered * lines}});
  }
}

// Handles deviations, and pairs of a deviation and a mean. The mean of a complex tensor is complex. Ranks join means
// and squares in float64.
OpRule deviation(const OpCall& call) {
  const at::ScalarType type = call.inputs.at(0).dtype;
  if (!c10::isFloatingType(type) && !c10::isComplexType(type)) return no_rule();  // LibTorch refuses it
  std::vector<at::ScalarType> types = {c10::toRealValueType(type), type};
  types.resize(num_outputs(call));
  OpRule rule = with_results(whole(call), reduced_sizes(call), types);
  if (!call.has_arg("correction") || c10::elementSize(types[0]) == 1) return rule;
  add_joined(rule, call, "deviation", {.gathered = c10::isComplexType(type) ? 24.0 : 16.0});
  return rule;
}

OpRule logsumexp(const OpCall& call) {
  const at::ScalarType type = call.inputs.at(0).dtype;
  if (at::isIntegralType(type, true)) return whole(call);
  OpRule rule = with_results(whole(call), reduced_sizes(call), {type});
  if (at::isFloatingType(type) && c10::elementSize(type) > 1) {
    add_joined(rule, call, "logsumexp", {.reduced = type == at::kDouble ? 16.0 : 8.0});
  }
  return rule;
}

bool are_compared(at::ScalarType type) {
  constexpr std::array kCompared = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kByte,
                                    at::kChar, at::kShort,    at::kInt,   at::kLong};
  return std::ranges::find(kCompared, type) != kCompared.end();
}

// Handles argmax and argmin, and max and min with an index.
OpRule extremum_and_index(const OpCall& call) {
  OpRule rule = whole(call);
  const at::ScalarType type = call.inputs.at(0).dtype;
  // LibTorch finds the index of bools only together with the value.
  const bool compared = are_compared(type) || (type == at::kBool && num_outputs(call) == 2);
  if (compared) {
    add_joined(rule, call, "extremum_index",
               {.reduced = static_cast<double>(c10::elementSize(type) + sizeof(int64_t))});
  }
  return rule;
}

// Ranks join what each of them finds in its piece of a line.
OpRule topk(const OpCall& call) {
  OpRule rule = along_dim(call);
  const TensorInfo& self = call.inputs.at(0);
  const int64_t dim = call.dim("dim", ndim(call)), k = call.arg("k").toInt();
  const int64_t numel = c10::multiply_integers(self.sizes);
  if (self.ndim() == 0 || numel == 0 || !are_compared(self.dtype)) return rule;
  const int64_t size = self.sizes[static_cast<std::size_t>(dim)];
  if (k < 1 || k > size) return rule;  // LibTorch refuses it, or nothing is chosen
  const double bytes =
      static_cast<double>(numel / size * k) * static_cast<double>(c10::elementSize(self.dtype) + sizeof(int64_t));
  rule.strategies.push_back({.inputs = {Shard(dim)},
                             .outputs = {Replicate(), Replicate()},
                             .kernel = "topk",
                             .joined = Strategy::Joined{.gathered = bytes}});
  return rule;
}

// Handles any and all. A pending max or min of bools or bytes stays pending. That of other numbers does not, since they
// may be negative: any(max(-1, 0)) is not max(any(-1), any(0)).
template <ReduceOp op>
OpRule idempotent(const OpCall& call) {
  if (names_no_dim(call)) return {};
  const at::ScalarType type = call.inputs.at(0).dtype;
  OpRule rule = by_terms(call, op, type == at::kByte ? at::kByte : at::kBool);
  if (type == at::kBool || type == at::kByte) rule.strategies.push_back(pass_partial(1, 1, {0}, op));
  return rule;
}

// A sum that is pending is reduced into any cut in the same time; one of a dimension that stays leaves nothing pending.
void prefer_cuts_that_stay(OpRule& rule) {
  std::stable_partition(rule.strategies.begin(), rule.strategies.end(),
                        [](const Strategy& strategy) { return !strategy.outputs[0].is_partial(); });
}

template <ReduceOp op>
OpRule extremum(const OpCall& call) {
  const Sizes& sizes = call.inputs.at(0).sizes;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end())
    return {};  // nothing to choose from: LibTorch throws its own error
  OpRule rule = by_terms(call, op, call.inputs.at(0).dtype, "extremum");
  prefer_cuts_that_stay(rule);
  rule.strategies.push_back(pass_partial(1, 1, {0}, op));
  return rule;
}

// Handles aminmax, whose results are a minimum and a maximum.
OpRule both_extrema(const OpCall& call) {
  const Sizes& sizes = call.inputs.at(0).sizes;
  if (std::ranges::find(sizes, 0) != sizes.end()) return {};  // as for one of them
  const at::ScalarType type = call.inputs[0].dtype;
  OpRule rule = by_terms(call, ReduceOp::kMin, type, "extremum");
  const OpRule largest = by_terms(call, ReduceOp::kMax, type, "extremum");
  for (std::size_t i = 0; i < rule.strategies.size(); ++i) {
    rule.strategies[i].outputs.push_back(largest.strategies[i].outputs[0]);
  }
  prefer_cuts_that_stay(rule);
  rule.outputs.push_back(rule.outputs[0]);
  return rule;
}

// max(x) is an extremum, max(x, dim) gives the index as well, and max(x, y) is composite.
template <ReduceOp op>
OpRule extremum_or_indices(const OpCall& call) {
  if (call.inputs.size() != 1) return no_rule();
  return call.has_arg("dim") ? extremum_and_index(call) : extremum<op>(call);
}

// Pieces give factors of the result.
OpRule product(const OpCall& call) {
  OpRule rule = by_terms(call, ReduceOp::kProduct, accumulated_type(call));
  if (converts_termwise(call.inputs.at(0).dtype, accumulated_type(call)))
    rule.strategies.push_back(pass_partial(1, 1, {0}, ReduceOp::kProduct));
  return rule;
}

OpRule along_with_indices(const OpCall& call) {
  return with_results(along_dim(call), call.inputs.at(0).sizes, {call.inputs[0].dtype, at::kLong});
}

OpRule logcumsumexp(const OpCall& call) {
  return with_results(along_dim(call), call.inputs.at(0).sizes, {call.inputs[0].dtype});
}

OpRule cumsum(const OpCall& call) {
  OpRule rule = along_dim(call);
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

// Computes sum(|x|^ord).
OpRule power_sum(const OpCall& call) { return by_terms(call, ReduceOp::kSum, c10::toRealValueType(result_type(call))); }

// Counts elements between given numbers. If these are not given, the least and the greatest element decide, so nothing
// is cut.
OpRule histogram(const OpCall& call) {
  if (call.arg("bins").toInt() < 1) return no_rule();  // LibTorch refuses it
  // On a GPU LibTorch compares the bounds in the tensor's dtype, and finds 0.2 and 0.8 equal among integers. It then
  // takes those of the tensor that it is given.
  const at::ScalarType type = call.inputs.at(0).dtype;
  const at::Scalar min = call.arg("min").toScalar(), max = call.arg("max").toScalar();
  bool given = min.toDouble() != max.toDouble();
  if (at::isIntegralType(type, /*includeBool=*/true)) {
    given = std::trunc(min.toDouble()) != std::trunc(max.toDouble());
  } else if (type != at::kDouble) {
    given = static_cast<float>(min.toDouble()) != static_cast<float>(max.toDouble());
  }
  OpRule rule;
  if (given) rule.strategies = shard_factors({letters(call.inputs.at(0).sizes.size())}, {"-"});
  rule.outputs = {{.sizes = {call.arg("bins").toInt()}, .dtype = call.inputs[0].dtype}};
  return rule;
}

// The inputs broadcast, and the operator is linear in each.
OpRule cross(const OpCall& call) {
  const Sizes sizes = broadcast_sizes(call.inputs);
  const int64_t asked = call.arg("dim").isNone() ? -1 : call.arg("dim").toInt();
  const Sizes dim = {asked < 0 ? asked + static_cast<int64_t>(sizes.size()) : asked};
  const Labels labels = with_whole(letters(sizes.size()), dim);
  OpRule rule{.strategies = shard_factors({broadcast_labels(call.inputs.at(0).sizes, sizes, labels),
                                           broadcast_labels(call.inputs.at(1).sizes, sizes, labels)},
                                          {labels})};
  add_linear_where_exact(rule, call, {{0}, {1}});
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"linalg__powsum", power_sum},
    {"histc", histogram},
    {"linalg_cross", cross},
    {"sum", sum},
    {"nansum", nansum},
    {"count_nonzero", count_nonzero},
    {"mean", mean},
    {"prod", product},
    {"amax", extremum<ReduceOp::kMax>},
    {"amin", extremum<ReduceOp::kMin>},
    {"max", extremum_or_indices<ReduceOp::kMax>},
    {"min", extremum_or_indices<ReduceOp::kMin>},
    {"any", idempotent<ReduceOp::kMax>},
    {"all", idempotent<ReduceOp::kMin>},
    {"argmax", extremum_and_index},
    {"argmin", extremum_and_index},
    {"aminmax", both_extrema},
    {"var", deviation},
    {"std", deviation},
    {"var_mean", deviation},
    {"std_mean", deviation},
    {"logsumexp", logsumexp},
    {"norm", whole},
    {"linalg_vector_norm", whole},
    {"median", whole_with_indices},
    {"nanmedian", whole_with_indices},
    {"kthvalue", whole_with_indices},
    {"mode", whole_with_indices},
    {"cumsum", cumsum},
    {"cumprod", along_dim},
    {"logcumsumexp", logcumsumexp},
    {"cummax", along_with_indices},
    {"cummin", along_with_indices},
    {"topk", topk},
    {"sort", along_dim},
    {"argsort", along_dim},
};

}  // namespace

std::span<const RuleEntry> reduction_rules() { return kTable; }

}  // namespace tessera::rules

#include <algorithm>
#include <optional>

#include "tessera/ops/rules/labels.h"

// This file has the rules of operators that compute each element from one element of every (broadcast) input.
namespace tessera::rules {
namespace {

bool writes_first(const OpCall& call) {
  const auto* const alias = call.schema.arguments().at(0).alias_info();
  return alias != nullptr && alias->isWrite();
}

// Returns the sizes to which the inputs broadcast: those of a tensor that is written do not change.
std::vector<int64_t> sizes_of_elements(const OpCall& call) {
  if (!call.outputs.empty()) return call.outputs[0].sizes;
  return writes_first(call) ? call.inputs.at(0).sizes : broadcast_sizes(call.inputs);
}

std::vector<Strategy> elementwise(const OpCall& call) {
  const auto sizes = sizes_of_elements(call);
  // Some backends return an output of another size, such as a buffer that they do not need.
  for (const TensorInfo& output : call.outputs) {
    if (output.sizes != sizes) return {};
  }
  if (!std::ranges::all_of(call.inputs, [&](const TensorInfo& input) { return broadcasts(input, sizes); })) return {};
  const Labels all = letters(sizes.size());
  std::vector<Labels> inputs;
  for (const TensorInfo& input : call.inputs) inputs.push_back(broadcast_labels(input.sizes, sizes, all));
  return shard_factors(inputs, std::vector<Labels>(num_outputs(call), all));
}

// Returns the floating dtype that all inputs share. Masks do not count, nor do 0-dimensional tensors beside others.
std::optional<at::ScalarType> common_type(const OpCall& call) {
  std::optional<at::ScalarType> type;
  const bool only_numbers = broadcast_sizes(call.inputs).empty();
  for (const TensorInfo& input : call.inputs) {
    if (!input.defined || input.dtype == at::kBool) continue;
    if (!at::isFloatingType(input.dtype)) return std::nullopt;
    if (input.sizes.empty() && !only_numbers) continue;
    if (type && *type != input.dtype) return std::nullopt;
    type = input.dtype;
  }
  return type;
}

// Returns the result of an operator such as relu or where, which LibTorch determines only by running it; empty if it is
// uncertain.
std::vector<TensorInfo> result(const OpCall& call) {
  if (writes_first(call) && num_outputs(call) == 1) return {call.inputs.at(0)};
  const auto type = common_type(call);
  if (!type || num_outputs(call) != 1) return {};
  return {{.sizes = broadcast_sizes(call.inputs), .dtype = *type}};
}

// The result is a bool.
OpRule predicate(const OpCall& call) {
  OpRule rule = plain(call);
  if (!writes_first(call)) rule.outputs = {{.sizes = broadcast_sizes(call.inputs), .dtype = at::kBool}};
  return rule;
}

// These operators are linear in the first input alone, such as scaling, and backward operators in the gradient.
OpRule linear_in_first(const OpCall& call) {
  OpRule rule = plain(call);
  add_linear_where_exact(rule, call, {{0}});
  return rule;
}

// Scales by a power of two. LibTorch has no meta kernel for integer exponents; the result then has the dtype of what is
// scaled.
OpRule scaled(const OpCall& call) {
  OpRule rule = linear_in_first(call);
  const bool known = call.outputs.empty() && at::isFloatingType(call.inputs.at(0).dtype);
  if (known) rule.outputs = {{.sizes = broadcast_sizes(call.inputs), .dtype = call.inputs[0].dtype}};
  return rule;
}

// For nondecreasing functions that are defined everywhere, a pending max or min stays pending.
void add_rising(OpRule& rule) {
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) rule.strategies.push_back(pass_partial(1, 1, {0}, op));
}

// These are nondecreasing functions of one tensor, which may have numbers as bounds.
OpRule rising(const OpCall& call) {
  OpRule rule = plain(call);
  if (call.inputs.size() == 1 && num_outputs(call) == 1) add_rising(rule);
  return rule;
}

// Elements are kept. A dtype conversion must not change how terms are reduced.
OpRule movement(const OpCall& call) {
  OpRule rule = plain(call);
  const at::ScalarType from = call.inputs.at(0).dtype;
  const at::ScalarType to = call.outputs.empty() ? from : call.outputs[0].dtype;
  if (at::isComplexType(from) != at::isComplexType(to)) {
    // Taking the real part is linear; it keeps neither products nor extrema.
    add_linear_where_exact(rule, call, {{0}});
  } else if (from == to || converts_termwise(from, to)) {
    add_movement(rule, call.inputs.size(), num_outputs(call));
  } else if (at::isFloatingType(to) && !c10::isFloat8Type(to)) {
    add_rising(rule);  // conversions keep the order; but of those to float8 some make NaN, or lose the sign
  }
  return rule;
}

// These add tensors. A number as the second operand would be added once per term, which is right for avg, max and min.
OpRule sum_of_tensors(const OpCall& call) {
  OpRule rule = plain(call);
  if (call.inputs.size() == 2) {
    add_linear_where_exact(rule, call, {{0, 1}});
    return rule;
  }
  rule.strategies.push_back(pass_partial(1, 1, {0}, ReduceOp::kAvg));
  const auto floating = [](const TensorInfo& info) { return at::isFloatingType(info.dtype); };
  const bool ordered = floating(call.inputs.at(0)) && std::ranges::all_of(call.outputs, floating);
  if (rule_key(call.schema.name()) != "rsub" && ordered) add_rising(rule);
  return rule;
}

// Inputs (a, b, c) give a + b c, which is linear in a and one factor together.
OpRule plus_product_of_tensors(const OpCall& call) {
  OpRule rule = plain(call);
  add_linear_where_exact(rule, call, {{0, 1}, {0, 2}});
  return rule;
}

// These are linear in the first two inputs together, such as a + b / c with a number c, or a + (b - a) c.
OpRule linear_in_two(const OpCall& call) {
  OpRule rule = plain(call);
  add_linear_where_exact(rule, call, {{0, 1}});
  return rule;
}

// The operator is linear in each of its tensors while the others are replicated. These are taken to hold no infinity,
// by which terms of both signs would give NaN; the dispatcher looks at single numbers alone.
OpRule product_of_tensors(const OpCall& call) {
  OpRule rule = plain(call);
  for (std::size_t i = 0; i < call.inputs.size(); ++i) add_linear_where_exact(rule, call, {{i}});
  return rule;
}

// Negation is linear, and a maximum becomes a minimum.
OpRule negated(const OpCall& call) {
  OpRule rule = linear_in_first(call);
  if (!at::isFloatingType(call.inputs.at(0).dtype)) return rule;  // the least integer has no negative
  rule.strategies.push_back({.inputs = {Partial(ReduceOp::kMax)}, .outputs = {Partial(ReduceOp::kMin)}});
  rule.strategies.push_back({.inputs = {Partial(ReduceOp::kMin)}, .outputs = {Partial(ReduceOp::kMax)}});
  return rule;
}

bool is_number(const TensorInfo& info) {
  return std::ranges::all_of(info.sizes, [](int64_t size) { return size == 1; });
}

// Terms may be divided by one number, since the dispatcher reduces them first where it may be 0. A tensor often has a 0
// somewhere, and terms of both signs divided by it add up to NaN where their sum gives an infinity.
OpRule quotient(const OpCall& call) {
  const bool rounds = call.has_arg("rounding_mode") && !call.arg("rounding_mode").isNone();
  const bool by_tensor = call.inputs.size() == 2 && !is_number(call.inputs[1]);
  return rounds || by_tensor ? plain(call) : linear_in_first(call);
}

// Inputs (a, b, c) give a + b / c.
OpRule plus_quotient(const OpCall& call) { return is_number(call.inputs.at(2)) ? linear_in_two(call) : plain(call); }

template <ReduceOp op>
OpRule extremum_of_tensors(const OpCall& call) {
  OpRule rule = plain(call);
  const bool same_type = call.inputs.size() == 2 && call.inputs[0].dtype == call.inputs[1].dtype;
  if (same_type) rule.strategies.push_back(pass_partial(2, 1, {0, 1}, op));
  return rule;
}

// Inputs `a` and `b` may be pending by the same reduction, since the operator picks elements of one or the other. The
// result has the dtype of `a`, or both are `promoted`.
OpRule pick(const OpCall& call, std::size_t a, std::size_t b, bool promoted = false) {
  OpRule rule = plain(call);
  const auto& in = call.inputs;
  if (in.size() <= b) return rule;
  const bool same_type = in[a].dtype == in[b].dtype;
  // A tensor without dimensions may be promoted to a smaller dtype than its own.
  const bool is_one = in[a].ndim() == 0 || in[b].ndim() == 0;
  const at::ScalarType to = promoted && !is_one ? c10::promoteTypes(in[a].dtype, in[b].dtype) : in[a].dtype;
  const bool termwise = converts_termwise(in[a].dtype, to) && converts_termwise(in[b].dtype, to) &&
                        (!promoted || !is_one || converts_termwise(to, in[b].dtype)) &&
                        at::isComplexType(in[a].dtype) == at::isComplexType(in[b].dtype);
  if (!same_type && !termwise) return rule;
  for (const ReduceOp op : kPlainReductions)
    rule.strategies.push_back(pass_partial(in.size(), num_outputs(call), {a, b}, op));
  return rule;
}

// The inputs are (self, mask); a number, or a third tensor, replaces elements where the mask is true.
OpRule masked_fill(const OpCall& call) {
  if (call.inputs.size() > 2) return pick(call, 0, 2);
  OpRule rule = plain(call);
  add_filled(rule, call, call.arg("value").toScalar());
  return rule;
}

OpRule where(const OpCall& call) { return pick(call, 1, 2, /*promoted=*/true); }
OpRule copy(const OpCall& call) { return pick(call, 0, 1); }

// Zeros reduce to zero by every reduction.
OpRule zero(const OpCall& call) {
  OpRule rule = plain(call);
  add_movement(rule, call.inputs.size(), num_outputs(call));
  return rule;
}

// Terms that all equal `value` reduce to it by avg, max and min.
OpRule fill(const OpCall& call) {
  OpRule rule = plain(call);
  if (call.inputs.size() == 1) {
    add_filled(rule, call, call.arg("value").toScalar());
    return rule;
  }
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin})
    rule.strategies.push_back(pass_partial(call.inputs.size(), num_outputs(call), {0}, op));
  return rule;
}

// Lists the values of the argument `reduction` of losses and their backward.
enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

int64_t reduction(const OpCall& call) { return call.arg("reduction").toInt(); }

bool same_sizes(const OpCall& call, std::size_t first) {
  return std::all_of(
      call.inputs.begin() + static_cast<std::ptrdiff_t>(first), call.inputs.end(),
      [&](const TensorInfo& input) { return !input.defined || input.sizes == call.inputs[first].sizes; });
}

// The inputs are (self, target, ...). Pieces give terms of the sum. A mean of pieces is decomposed before, into a sum
// and a division. An input that is broadcast cannot be pending: its terms would be counted once per piece.
OpRule loss(const OpCall& call) {
  // LibTorch's kernel refuses it, but not for a piece without elements.
  if (call.has_arg("delta") && !(call.arg("delta").toDouble() > 0)) return no_rule();
  if (reduction(call) == kNone) return plain(call);
  OpRule rule;
  const Labels all = letters(call.inputs.at(0).sizes.size());
  std::vector<Labels> inputs;
  for (const TensorInfo& input : call.inputs) inputs.push_back(input.defined ? all : Labels());
  if (same_sizes(call, 0) && reduction(call) == kSum) rule.strategies = shard_factors(inputs, {Labels()});
  if (const auto type = common_type(call)) rule.outputs = {{.sizes = {}, .dtype = *type}};
  return rule;
}

// (grad, self, target, ...)
OpRule loss_backward(const OpCall& call) {
  OpRule rule = plain(call);
  if (reduction(call) == kMean) rule.strategies.clear();  // it divides by the number of elements
  add_linear_where_exact(rule, call, {{0}});
  if (rule_key(call.schema.name()) == "mse_loss_backward") add_linear_where_exact(rule, call, {{1, 2}});
  return rule;
}

// These shift integers, all of one dtype.
OpRule shift(const OpCall& call) {
  OpRule rule = plain(call);
  const auto& in = call.inputs;
  const auto same = [&](const TensorInfo& input) { return input.dtype == in[0].dtype; };
  if (!writes_first(call) && std::all_of(in.begin(), in.end(), same)) {
    rule.outputs = {{.sizes = broadcast_sizes(in), .dtype = in[0].dtype}};
  }
  return rule;
}

// Returns the result and a buffer for the gradient, which has the result's size on a CPU and no elements on a GPU.
OpRule log_sigmoid(const OpCall& call) {
  const Labels labels = labels_of(call.inputs.at(0));
  TensorInfo buffer = call.inputs[0];
  const bool on_gpu = call.device != c10::DeviceType::CPU;
  if (on_gpu) buffer.sizes = {0};
  OpRule rule{.strategies = shard_factors({labels}, {labels, on_gpu ? "-" : labels})};
  for (Strategy& strategy : rule.strategies) {
    if (on_gpu) strategy.outputs[1] = Replicate();
  }
  rule.outputs = {call.inputs[0], buffer};
  return rule;
}

// On a GPU the buffer is empty and is not read, and meta tensors give the result its size.
OpRule log_sigmoid_backward(const OpCall& call) {
  if (call.device == c10::DeviceType::CPU) return linear_in_first(call);
  const Labels labels = labels_of(call.inputs.at(0));
  OpRule rule{.strategies = shard_factors({labels, labels, "-"}, {labels})};
  for (Strategy& strategy : rule.strategies) strategy.inputs[2] = Replicate();
  rule.outputs = {call.inputs[0]};
  return rule;
}

// The inputs are real and imaginary part, or magnitude and angle.
OpRule complex_of(const OpCall& call) {
  OpRule rule = plain(call);
  if (!rule.outputs.empty()) rule.outputs[0].dtype = c10::toComplexType(rule.outputs[0].dtype);
  return rule;
}

OpRule complex_of_parts(const OpCall& call) {
  OpRule rule = complex_of(call);
  add_linear(rule, 2, 1, {{0, 1}});
  return rule;
}

constexpr RuleEntry kSpecial[] = {
    {"__lshift__", shift},
    {"__rshift__", shift},
    {"log_sigmoid_forward", log_sigmoid},
    {"log_sigmoid_backward", log_sigmoid_backward},
    {"complex", complex_of_parts},
    {"polar", complex_of},
    {"add", sum_of_tensors},
    {"sub", sum_of_tensors},
    {"rsub", sum_of_tensors},
    {"mul", product_of_tensors},
    {"div", quotient},
    {"maximum", extremum_of_tensors<ReduceOp::kMax>},
    {"minimum", extremum_of_tensors<ReduceOp::kMin>},
    {"addcmul", plus_product_of_tensors},
    {"addcdiv", plus_quotient},
    {"lerp", linear_in_two},
    {"neg", negated},
    {"masked_fill", masked_fill},
    {"where", where},
    {"copy", copy},
    {"zero", zero},
    {"fill", fill},
    {"ldexp", scaled},
};

constexpr std::string_view kMovement =
    "clone detach alias lift lift_fresh _to_copy detach_copy alias_copy lift_fresh_copy ";

constexpr std::string_view kLinearInFirst =
    "_neg_view _neg_view_copy _conj _conj_copy _conj_physical conj_physical deg2rad rad2deg native_dropout_backward "
    "gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward hardtanh_backward "
    "leaky_relu_backward elu_backward softplus_backward hardsigmoid_backward hardswish_backward mish_backward "
    "hardshrink_backward softshrink_backward ";

constexpr std::string_view kRising =
    "asinh atan ceil clamp clamp_max clamp_min erf exp exp2 expm1 floor hardsigmoid hardtanh relu round sigmoid sinh "
    "tanh trunc ";

constexpr std::string_view kLosses = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss ";
constexpr std::string_view kLossesBackward =
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward "
    "soft_margin_loss_backward ";

constexpr std::string_view kPredicates =
    "isinf isnan isneginf isposinf logical_not logical_and logical_or logical_xor signbit eq ge gt le lt ne ";

constexpr std::string_view kPlain =
    // These take one tensor.
    "abs acos acosh angle asin atanh bitwise_not cos cosh digamma erfc erfinv frac frexp i0 lgamma log log10 log1p "
    "log2 logit mvlgamma nan_to_num polygamma reciprocal rsqrt sgn sign sin sinc sqrt tan special_airy_ai "
    "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e "
    "special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 "
    "special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 "
    // These are activations.
    "celu elu gelu hardshrink hardswish leaky_relu mish silu softplus softshrink threshold _prelu_kernel "
    // These take two tensors, or a tensor and a number. logit_backward multiplies by an infinity at 0 and 1.
    "atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor __ilshift__ __irshift__ copysign "
    "floor_divide fmax fmin fmod gcd heaviside hypot igamma igammac lcm logaddexp logaddexp2 nextafter pow remainder "
    "_add_relu special_xlog1py special_zeta xlogy rrelu_with_noise_backward _standard_gamma_grad "
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
    "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w logit_backward ";

// `names` has a space after each.
void append(std::vector<RuleEntry>& table, std::string_view names, RuleFn rule) {
  while (!names.empty()) {
    const auto end = names.find(' ');
    table.push_back({names.substr(0, end), rule});
    names.remove_prefix(end + 1);
  }
}

std::vector<RuleEntry> make_table() {
  std::vector<RuleEntry> table(std::begin(kSpecial), std::end(kSpecial));
  append(table, kMovement, movement);
  append(table, kLinearInFirst, linear_in_first);
  append(table, kRising, rising);
  append(table, kLosses, loss);
  append(table, kLossesBackward, loss_backward);
  append(table, kPredicates, predicate);
  append(table, kPlain, plain);
  return table;
}

}  // namespace

OpRule plain(const OpCall& call) {
  OpRule rule{.strategies = elementwise(call)};
  if (call.outputs.empty()) rule.outputs = result(call);
  return rule;
}

std::span<const RuleEntry> pointwise_rules() {
  static const std::vector<RuleEntry> table = make_table();
  return table;
}

}  // namespace tessera::rules

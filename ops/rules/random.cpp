#include <algorithm>
#include <array>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/ops/rules/integer_range.h"
#include "tessera/ops/rules/labels.h"

// This file has the rules of operators that draw random numbers per element. A result has the same numbers however it
// is cut (local kernel "draw").
namespace tessera::rules {
namespace {

[[noreturn]] void refuse(const OpCall& call, std::string_view name, double value, std::string_view needed) {
  throw std::invalid_argument(fmt::format("{}: {} is {}; give {}", call.schema.name(), name, value, needed));
}

bool is_number(const OpCall& call, std::string_view name) {
  return call.has_arg(name) && (call.arg(name).isDouble() || call.arg(name).isInt());
}

double number(const OpCall& call, std::string_view name) { return call.arg(name).toScalar().toDouble(); }

at::ScalarType type_of_result(const OpCall& call) {
  if (!call.outputs.empty()) return call.outputs[0].dtype;
  if (call.has_arg("dtype") && !call.arg("dtype").isNone()) return call.arg("dtype").toScalarType();
  return call.inputs.at(0).dtype;
}

// Says which dtypes LibTorch's CPU kernel of an operator draws.
struct Dtypes {
  std::string_view op;
  bool complex = false;
  bool integers = false;  // without bool
  bool booleans = false;
};
constexpr std::array kDtypes = {
    Dtypes{"uniform", /*complex=*/true},
    Dtypes{"normal", /*complex=*/true},
    Dtypes{"rand_like", /*complex=*/true},
    Dtypes{"randn_like", /*complex=*/true},
    Dtypes{"exponential"},
    Dtypes{"log_normal"},
    Dtypes{"cauchy"},
    Dtypes{"geometric", /*complex=*/false, /*integers=*/true},
    Dtypes{"bernoulli", /*complex=*/false, /*integers=*/true, /*booleans=*/true},
};

// Refuses a dtype that cannot be drawn, alike on every rank, before the draw is numbered.
void check_dtype(const OpCall& call, std::string_view key) {
  const auto known = std::ranges::find(kDtypes, key, &Dtypes::op);
  if (known == kDtypes.end()) return;
  constexpr std::array kFloating = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  const at::ScalarType dtype = type_of_result(call);
  constexpr std::array kIntegers = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong};
  const bool integer = std::ranges::find(kIntegers, dtype) != kIntegers.end();
  const at::ScalarType part = known->complex ? c10::toRealValueType(dtype) : dtype;
  if (std::ranges::find(kFloating, part) != kFloating.end() || (known->integers && integer)) return;
  if (known->booleans && dtype == at::kBool) return;
  throw std::invalid_argument(fmt::format(
      "{}: numbers of {} cannot be drawn; give Half, BFloat16, Float or Double{}", call.schema.name(),
      c10::toString(dtype),
      known->complex ? ", or their complex dtypes" : (known->integers ? ", or a signed integer dtype or Byte" : ""),
      known->booleans ? ", or Bool" : ""));
}

// Checks the dtype and the parameters, which LibTorch's meta kernels do not check.
void check_parameters(const OpCall& call) {
  const std::string key = rule_key(call.schema.name());
  check_dtype(call, key);
  if (is_number(call, "p")) {
    const double p = number(call, "p");
    const bool inside = key == "geometric" ? p > 0 && p < 1 : p >= 0 && p <= 1;
    if (!inside) refuse(call, "p", p, key == "geometric" ? "a number between 0 and 1" : "a number from 0 to 1");
  }
  const bool may_be_zero = key == "normal";
  for (const std::string_view name : {"std", "sigma", "lambd"}) {
    if (!is_number(call, name)) continue;
    const double value = number(call, name);
    const bool inside = may_be_zero ? value >= 0 : value > 0;
    if (!inside) refuse(call, name, value, may_be_zero ? "a number of 0 or more" : "a number above 0");
  }
  if (key == "random" || key == "randint_like") integer_range(call.schema, call.args, type_of_result(call));
}

OpRule drawn(const OpCall& call) {
  check_parameters(call);
  OpRule rule = plain(call);
  rule.kernel = "draw";
  return rule;
}

// (input) -> (result, mask)
OpRule dropout(const OpCall& call) {
  OpRule rule = drawn(call);
  const TensorInfo& input = call.inputs.at(0);
  rule.outputs = {input, {.sizes = input.sizes, .dtype = at::kBool}};
  return rule;
}

// The result is sharded as the input is, of which only the sizes are used.
OpRule like(const OpCall& call) {
  if (call.inputs.size() != 1) return no_rule();  // randint_like.Tensor
  check_parameters(call);
  OpRule rule = sizes_of_first(call);
  rule.kernel = "draw";
  return rule;
}

constexpr RuleEntry kTable[] = {
    {"bernoulli", drawn},        {"normal", drawn},     {"uniform", drawn},   {"random", drawn},
    {"exponential", drawn},      {"log_normal", drawn}, {"geometric", drawn}, {"cauchy", drawn},
    {"native_dropout", dropout}, {"rand_like", like},   {"randn_like", like}, {"randint_like", like},
};

}  // namespace

std::span<const RuleEntry> random_rules() { return kTable; }

}  // namespace tessera::rules

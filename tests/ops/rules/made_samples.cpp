#include <ATen/ATen.h>

#include "tessera/tests/ops/rules/samples.h"

namespace tessera::testing {
namespace {

enum class Kind { kFloat, kInt };

at::Tensor make_tensor(Kind kind) {
  if (kind == Kind::kInt) return at::randint(1, 6, {5, 3}, at::kLong);
  return at::rand({5, 3}, at::kDouble) * 0.8 + 0.1;
}

// Returns nullopt if no sensible argument can be made.
std::optional<at::IValue> make_argument(const c10::Argument& argument, Kind kind) {
  if (argument.default_value()) return argument.default_value();
  switch (argument.type()->kind()) {
    case c10::TypeKind::TensorType:
      if (argument.name() == "mask" || argument.name() == "condition") return make_tensor(kind) < 0.5;
      return make_tensor(kind);
    case c10::TypeKind::NumberType: return kind == Kind::kInt ? at::IValue(2) : at::IValue(0.5);
    case c10::TypeKind::FloatType: return at::IValue(0.5);
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return at::IValue(2);
    case c10::TypeKind::BoolType: return at::IValue(false);
    case c10::TypeKind::OptionalType: return at::IValue();
    default: return std::nullopt;
  }
}

bool writes_out(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.kwarg_only() && argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return true;
  }
  return false;
}

// Composite operators decompose before any rule sees them.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

bool draws(const std::string& name) {
  for (const char* random :
       {"bernoulli", "normal", "uniform", "rand", "exponential", "geometric", "cauchy", "dropout"}) {
    if (name.find(random) != std::string::npos && name.find("backward") == std::string::npos) return true;
  }
  return false;
}

std::optional<Sample> make_sample(const c10::OperatorHandle& op, Kind kind) {
  Sample sample;
  sample.op = op.schema().name();
  if (!op.schema().overload_name().empty()) sample.op += "." + op.schema().overload_name();
  sample.random = draws(op.schema().name());
  bool has_tensor = false;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto value = make_argument(argument, kind);
    if (!value) return std::nullopt;
    has_tensor |= value->isTensor();
    sample.args.push_back(*value);
  }
  if (!has_tensor) return std::nullopt;
  try {
    const Prepared trial(sample);
    for (const at::Tensor& t : trial.results()) {
      if (!t.defined()) return std::nullopt;
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return sample;
}

}  // namespace

std::vector<Sample> made_samples(const std::string& base_name) {
  std::vector<Sample> out;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (rules::rule_key(name.name) != base_name || name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || writes_out(op->schema()) || is_composite(*op)) continue;
    for (const Kind kind : {Kind::kFloat, Kind::kInt}) {
      if (auto sample = make_sample(*op, kind)) {
        out.push_back(std::move(*sample));
        break;
      }
    }
  }
  return out;
}

}  // namespace tessera::testing

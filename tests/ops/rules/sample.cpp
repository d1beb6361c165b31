#include "tessera/tests/ops/rules/sample.h"

#include <stdexcept>

#include <ATen/ATen.h>

#include "tessera/tests/harness/device.h"

namespace tessera::testing {
namespace {

torch::jit::Stack with_defaults(const c10::FunctionSchema& schema, torch::jit::Stack args) {
  for (std::size_t i = args.size(); i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.default_value()) {
      args.push_back(*argument.default_value());
    } else if (argument.type()->kind() == c10::TypeKind::OptionalType) {
      args.emplace_back();
    } else {
      throw std::logic_error(schema.name() + ": give argument " + argument.name());
    }
  }
  return args;
}

bool takes_tensor(const c10::Argument& argument) {
  if (argument.type()->kind() == c10::TypeKind::TensorType) return true;
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::TensorType;
}

}  // namespace

c10::OperatorHandle find_op(const std::string& full_name) {
  const auto dot = full_name.find('.');
  const std::string overload = dot == std::string::npos ? "" : full_name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(full_name.substr(0, dot).c_str(), overload.c_str());
}

WholeCall::WholeCall(const Sample& sample)
    : op_(find_op(sample.op)),
      args_(with_defaults(op_.schema(), sample.args)),
      random_(sample.random),
      in_place_(!op_.schema().returns().empty() && op_.schema().returns()[0].alias_info() != nullptr &&
                op_.schema().returns()[0].alias_info()->isWrite()) {
  flatten();
  for (at::Tensor& t : tensors_) t = on_device(t);
  args_ = args_with(tensors_);
  std::vector<at::Tensor> copies;
  for (const at::Tensor& t : tensors_) copies.push_back(t.defined() ? t.clone() : t);
  values_ = call(args_with(copies));
  results_ = tensors_of(values_);
}

void WholeCall::flatten() {
  for (std::size_t i = 0; i < args_.size(); ++i) {
    if (args_[i].isTensorList()) {
      for (const at::Tensor& t : args_[i].toTensorVector()) tensors_.push_back(t);
    } else if (args_[i].isOptionalTensorList()) {
      for (const auto& t : args_[i].toOptionalTensorVector()) tensors_.push_back(t.value_or(at::Tensor()));
    } else if (takes_tensor(schema().arguments()[i])) {
      tensors_.push_back(args_[i].isTensor() ? args_[i].toTensor() : at::Tensor());
    }
    arg_of_.resize(tensors_.size(), i);
  }
}

bool WholeCall::writes(std::size_t tensor) const {
  const auto* const alias = schema().arguments()[arg_of_.at(tensor)].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool WholeCall::is_out(std::size_t tensor) const {
  return writes(tensor) && schema().arguments()[arg_of_.at(tensor)].kwarg_only();
}

torch::jit::Stack WholeCall::args_with(const std::vector<at::Tensor>& tensors) const {
  torch::jit::Stack out = args_;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (std::size_t j = 0; j < tensors.size(); ++j) {
        if (arg_of_[j] == i) list.push_back(tensors[j]);
      }
      out[i] = list;
      continue;
    }
    if (out[i].isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::size_t j = 0; j < tensors.size(); ++j) {
        if (arg_of_[j] == i) list.push_back(tensors[j].defined() ? std::make_optional(tensors[j]) : std::nullopt);
      }
      out[i] = list;
      continue;
    }
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      if (arg_of_[j] == i && tensors[j].defined()) out[i] = tensors[j];
    }
  }
  return out;
}

torch::jit::Stack WholeCall::call(torch::jit::Stack args) const {
  op_.callBoxed(args);
  return args;
}

std::vector<at::Tensor> WholeCall::run(torch::jit::Stack args) const { return tensors_of(call(std::move(args))); }

std::vector<at::Tensor> tensors_of(const torch::jit::Stack& values) {
  std::vector<at::Tensor> out;
  for (const at::IValue& value : values) {
    if (value.isTensor()) out.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) out.push_back(t);
    }
    if (value.isNone()) out.emplace_back();
  }
  return out;
}

namespace {

rules::TensorInfo info_of(const at::Tensor& t) {
  if (!t.defined()) return {.sizes = {}, .dtype = at::kFloat, .defined = false};
  return {.sizes = t.sizes().vec(), .dtype = t.scalar_type()};
}

}  // namespace

Prepared::Prepared(const Sample& sample)
    : WholeCall(sample), call_{.schema = schema(), .args = args(), .inputs = {}, .outputs = {}, .first_input = {}} {
  const rules::RuleFn fn = rules::find_rule(sample.rule.empty() ? rules::rule_key(schema().name()) : sample.rule);
  if (fn == nullptr) throw std::logic_error("no rule for " + sample.op);
  for (std::size_t i = 0, next = 0; i < args().size(); ++i) {
    while (next < tensors().size() && arg_of(next) < i) ++next;
    call_.first_input.push_back(next);
  }
  for (const at::Tensor& t : tensors()) call_.inputs.push_back(info_of(t));
  run_on_meta();
  rule_ = fn(call_);
}

std::vector<rules::TensorInfo> Prepared::outputs() const {
  std::vector<rules::TensorInfo> out;
  for (const at::Tensor& t : results()) out.push_back(info_of(t));
  return out;
}

void Prepared::run_on_meta() {
  std::vector<at::Tensor> metas;
  for (const at::Tensor& t : tensors()) metas.push_back(t.defined() ? t.to(at::kMeta) : t);
  try {
    for (const at::Tensor& t : run(args_with(metas))) call_.outputs.push_back(info_of(t));
  } catch (const c10::NotImplementedError&) {
  }
}

}  // namespace tessera::testing

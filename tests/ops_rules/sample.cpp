#include "tessera/tests/ops_rules/sample.h"

#include <stdexcept>

#include <ATen/ATen.h>

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

Prepared::Prepared(const Sample& sample)
    : op_(find_op(sample.op)),
      args_(with_defaults(op_.schema(), sample.args)),
      random_(sample.random),
      in_place_(!op_.schema().returns().empty() && op_.schema().returns()[0].alias_info() != nullptr &&
                op_.schema().returns()[0].alias_info()->isWrite()),
      call_{.schema = op_.schema(), .args = args_, .inputs = {}, .outputs = {}, .first_input = {}} {
  flatten();
  std::vector<at::Tensor> copies;
  for (const at::Tensor& t : tensors_) copies.push_back(t.defined() ? t.clone() : t);
  results_ = run(args_with(copies));
  run_on_meta();
  const rules::RuleFn fn = rules::find_rule(sample.rule.empty() ? rules::rule_key(op_.schema().name()) : sample.rule);
  if (fn == nullptr) throw std::logic_error("no rule for " + sample.op);
  rule_ = fn(call_);
}

void Prepared::flatten() {
  for (std::size_t i = 0; i < args_.size(); ++i) {
    call_.first_input.push_back(tensors_.size());
    if (args_[i].isTensorList()) {
      for (const at::Tensor& t : args_[i].toTensorVector()) tensors_.push_back(t);
    } else if (takes_tensor(schema().arguments()[i])) {
      tensors_.push_back(args_[i].isTensor() ? args_[i].toTensor() : at::Tensor());
    }
    arg_of_.resize(tensors_.size(), i);
  }
  for (const at::Tensor& t : tensors_) {
    rules::TensorInfo info{.sizes = {}, .dtype = at::kFloat, .defined = t.defined()};
    if (t.defined()) info = {.sizes = t.sizes().vec(), .dtype = t.scalar_type()};
    call_.inputs.push_back(info);
  }
}

void Prepared::run_on_meta() {
  std::vector<at::Tensor> metas;
  for (const at::Tensor& t : tensors_) metas.push_back(t.defined() ? t.to(at::kMeta) : t);
  try {
    for (const at::Tensor& t : run(args_with(metas))) {
      rules::TensorInfo info{.sizes = {}, .dtype = at::kFloat, .defined = t.defined()};
      if (t.defined()) info = {.sizes = t.sizes().vec(), .dtype = t.scalar_type()};
      call_.outputs.push_back(info);
    }
  } catch (const c10::NotImplementedError&) {
  }
}

torch::jit::Stack Prepared::args_with(const std::vector<at::Tensor>& tensors) const {
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
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      if (arg_of_[j] == i && tensors[j].defined()) out[i] = tensors[j];
    }
  }
  return out;
}

std::vector<at::Tensor> Prepared::run(torch::jit::Stack args) const {
  op_.callBoxed(args);
  std::vector<at::Tensor> out;
  for (const at::IValue& value : args) {
    if (value.isTensor()) out.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) out.push_back(t);
    }
    if (value.isNone()) out.emplace_back();
  }
  return out;
}

std::vector<at::Tensor> Prepared::run_as(const std::string& op, torch::jit::Stack args) const {
  const c10::OperatorHandle other = find_op(op);
  other.callBoxed(args);
  return {args[0].toTensor()};
}

}  // namespace tessera::testing

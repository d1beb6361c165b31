#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tessera/ops/rules/rule.h"

namespace tessera::testing {

// Describes a call of an operator on whole tensors.
struct Sample {
  std::string op;          // "aten::add.Tensor"
  torch::jit::Stack args;  // in schema order; omitted ones take their defaults
  bool random = false;     // the values are random or not set, so only sizes are compared
  std::string rule = {};   // the rule's key where it differs from the operator's
};

// Holds a sample that was run on whole tensors.
class WholeCall {
 public:
  explicit WholeCall(const Sample& sample);

  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }  // flattened; absent ones are undefined
  const std::vector<at::Tensor>& results() const { return results_; }  // of the call on whole tensors
  // Returns all results, tensors or not, as the operator left them.
  const torch::jit::Stack& values() const { return values_; }
  const torch::jit::Stack& args() const { return args_; }
  bool random() const { return random_; }
  bool in_place() const { return in_place_; }
  // Says whether the operator writes this tensor.
  bool writes(std::size_t tensor) const;
  // Says whether this is an out= tensor.
  bool is_out(std::size_t tensor) const;
  // Says whether the operator compares the tensor with 1, which rounded terms would not add up to.
  bool is_flag(std::size_t tensor) const { return schema().arguments()[arg_of_[tensor]].name() == "found_inf"; }

  // Returns the arguments with other tensors in the place of `tensors()`.
  torch::jit::Stack args_with(const std::vector<at::Tensor>& tensors) const;
  // Runs the operator. call() returns the results that it leaves; run() returns their tensors, flattened.
  torch::jit::Stack call(torch::jit::Stack args) const;
  std::vector<at::Tensor> run(torch::jit::Stack args) const;

 protected:
  std::size_t arg_of(std::size_t tensor) const { return arg_of_[tensor]; }

 private:
  void flatten();

  c10::OperatorHandle op_;
  torch::jit::Stack args_;
  bool random_;
  bool in_place_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> arg_of_;  // the argument of each tensor
  torch::jit::Stack values_;
  std::vector<at::Tensor> results_;
};

// Adds to a call what rules and the simulation need to know of it. Throws std::logic_error if there is no rule.
class Prepared : public WholeCall {
 public:
  explicit Prepared(const Sample& sample);

  const rules::OpCall& call() const { return call_; }
  const rules::OpRule& rule() const { return rule_; }
  std::vector<rules::TensorInfo> outputs() const;  // what the results are
  bool has_meta() const { return !call_.outputs.empty(); }

 private:
  void run_on_meta();

  rules::OpCall call_;
  rules::OpRule rule_;
};

std::vector<at::Tensor> tensors_of(const torch::jit::Stack& values);

c10::OperatorHandle find_op(const std::string& full_name);

}  // namespace tessera::testing

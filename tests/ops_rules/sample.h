#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tessera/ops/rules/rule.h"

namespace tessera::testing {

// One call of an operator on whole tensors.
struct Sample {
  std::string op;          // "aten::add.Tensor"
  torch::jit::Stack args;  // in schema order; those left out take their defaults
  bool random = false;     // the values are drawn, or not set: only sizes are compared
  std::string rule = {};   // the rule's key where it is not the operator's
};

// A sample with what rules and the simulation need to know of it.
class Prepared {
 public:
  explicit Prepared(const Sample& sample);

  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }  // flattened, undefined ones for what is absent
  const std::vector<at::Tensor>& results() const { return results_; }  // of the whole call
  const rules::OpCall& call() const { return call_; }
  const rules::OpRule& rule() const { return rule_; }
  const torch::jit::Stack& args() const { return args_; }
  bool random() const { return random_; }
  bool in_place() const { return in_place_; }
  bool has_meta() const { return !call_.outputs.empty(); }

  // The arguments with other tensors in the places of `tensors()`.
  torch::jit::Stack args_with(const std::vector<at::Tensor>& tensors) const;
  // Runs the operator; its tensor results, flattened.
  std::vector<at::Tensor> run(torch::jit::Stack args) const;
  std::vector<at::Tensor> run_as(const std::string& op, torch::jit::Stack args) const;

 private:
  void flatten();
  void run_on_meta();

  c10::OperatorHandle op_;
  torch::jit::Stack args_;
  bool random_;
  bool in_place_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> arg_of_;  // for each tensor, its argument
  std::vector<at::Tensor> results_;
  rules::OpCall call_;
  rules::OpRule rule_;
};

c10::OperatorHandle find_op(const std::string& full_name);

}  // namespace tessera::testing

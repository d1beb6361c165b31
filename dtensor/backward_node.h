#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "tessera/dtensor/tangent.h"

namespace tessera::detail {

// Is a node of autograd's graph that holds saved tensors and a formula. A `Formula` has
//   static constexpr const char* kName
//   variable_list operator()(const Node& node, const variable_list& saved, variable_list& gradients)
// with the types of torch::autograd, which returns a gradient for each input. It may be undefined, and is not used
// where node.task_should_compute_output(i) is false. A gradient of a result that took no part in the loss is undefined.
// Where all are, the formula is not called.
template <class Formula>
class BackwardNode final : public torch::autograd::Node {
 public:
  explicit BackwardNode(Formula formula) : formula_(std::move(formula)) {}

  void save(at::TensorList tensors) {
    for (const at::Tensor& t : tensors) saved_.emplace_back(t, /*is_output=*/false);
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    if (std::ranges::none_of(gradients, [](const at::Tensor& g) { return g.defined(); })) {
      return torch::autograd::variable_list(num_outputs());
    }
    torch::autograd::variable_list saved;
    saved.reserve(saved_.size());
    for (const torch::autograd::SavedVariable& each : saved_) saved.push_back(each.unpack());
    return formula_(*this, saved, gradients);
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (torch::autograd::SavedVariable& each : saved_) each.reset_data();
  }
  std::string name() const override { return Formula::kName; }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
  Formula formula_;
};

inline void set_history_of(at::TensorList results, const std::shared_ptr<torch::autograd::Node>& node) {
  for (const at::Tensor& result : results) {
    if (torch::autograd::isDifferentiableType(result.scalar_type())) {
      torch::autograd::set_history(result, node);
    } else {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
}

// Returns a factor of a product if the other one's gradient needs it: what record() saves of it.
inline at::Tensor kept_for(const at::Tensor& other, const at::Tensor& factor) {
  return other.requires_grad() ? factor : at::Tensor();
}

// Calls `forward`, which returns a new tensor or a list of them, without recording what it does, and records `formula`
// for the results if one of `inputs` requires a gradient; an input may be undefined. `saved` is what the formula gets
// in backward: inputs, undefined tensors, or results without derivatives, which `forward` may put there. It does what
// torch::autograd::Function does in less time: in the step of a small model that class's maps, sets and demangled names
// take as long as the work. It is not for results that are inputs or autograd's views of them. As in LibTorch's own
// formulas, and not as in that class, a missing gradient is no tensor of zeros. Throws std::logic_error if an input has
// a tangent, which would be lost.
template <class Formula, class Forward>
auto record(at::TensorList inputs, at::TensorList saved, Formula formula, const Forward& forward) {
  if (std::ranges::any_of(inputs, [](const at::Tensor& t) { return has_tangent(t); })) {
    throw std::logic_error(std::string(Formula::kName) + ": an input has a tangent");
  }
  const bool recorded =
      c10::GradMode::is_enabled() && std::ranges::any_of(inputs, [](const at::Tensor& t) { return t.requires_grad(); });
  auto results = [&] {
    const c10::AutoGradMode no_gradient(false);
    return forward();
  }();
  if (!recorded) return results;
  const std::shared_ptr<BackwardNode<Formula>> node(new BackwardNode<Formula>(std::move(formula)),
                                                    torch::autograd::deleteNode);
  for (const at::Tensor& each : inputs) {
    node->add_next_edge(each.defined() ? torch::autograd::impl::gradient_edge(each) : torch::autograd::Edge());
  }
  node->save(saved);
  set_history_of(results, node);
  return results;
}

}  // namespace tessera::detail

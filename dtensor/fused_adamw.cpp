#include "tessera/dtensor/fused_adamw.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera {
namespace {

void check_options(const FusedAdamWOptions& options) {
  const auto refuse = [](const char* name, double value, const char* range) {
    throw std::invalid_argument(fmt::format("FusedAdamW: {} is {}; give a number {}", name, value, range));
  };
  if (!(options.lr >= 0)) refuse("lr", options.lr, "of 0 or more");
  if (!(options.eps >= 0)) refuse("eps", options.eps, "of 0 or more");
  if (!(options.weight_decay >= 0)) refuse("weight_decay", options.weight_decay, "of 0 or more");
  if (!(options.beta1 >= 0 && options.beta1 < 1)) refuse("beta1", options.beta1, "from 0 to less than 1");
  if (!(options.beta2 >= 0 && options.beta2 < 1)) refuse("beta2", options.beta2, "from 0 to less than 1");
}

void check_parameters(const std::vector<at::Tensor>& parameters) {
  std::set<const void*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& p = parameters[i];
    if (!p.defined()) throw std::invalid_argument(fmt::format("FusedAdamW: parameter {} is undefined", i));
    if (!p.is_leaf()) {
      throw std::invalid_argument(
          fmt::format("FusedAdamW: parameter {} is the result of an operator; give a leaf, whose gradient is kept", i));
    }
    if (!seen.insert(p.unsafeGetTensorImpl()).second) {
      throw std::invalid_argument(fmt::format("FusedAdamW: parameter {} is listed twice; list it once", i));
    }
    if (!is_dtensor(p) && !p.is_non_overlapping_and_dense()) {
      throw std::invalid_argument(fmt::format(
          "FusedAdamW: the memory of parameter {}, of strides [{}], has gaps or overlaps; give it memory of "
          "its own by contiguous()",
          i, fmt::join(p.strides(), ", ")));
    }
  }
}

// Returns the gradient in the parameter's memory order, in which LibTorch's operator walks through all plain tensors.
at::Tensor in_order_of(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (is_dtensor(parameter) || same_memory_order(parameter, gradient)) return gradient;
  return at::empty_like(parameter.detach()).copy_(gradient);
}

// Returns the indices of the groups of `optimizer` that have the parameters `ours`, and no others.
std::vector<std::size_t> groups_of(const torch::optim::AdamW& optimizer, const std::set<const void*>& ours,
                                   const char* op) {
  std::vector<std::size_t> found;
  std::set<const void*> theirs, known;
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto count = known.size();
    std::set<const void*> group;
    for (const at::Tensor& p : optimizer.param_groups()[i].params()) group.insert(p.unsafeGetTensorImpl());
    theirs.insert(group.begin(), group.end());
    std::ranges::set_intersection(group, ours, std::inserter(known, known.end()));
    if (known.size() == count) continue;
    if (known.size() - count < group.size()) {
      throw std::invalid_argument(
          fmt::format("FusedAdamW::{}: group {} of the optimizer has {} parameters, of which {} are among the {} here; "
                      "make it from "
                      "the same tensors, after parallelize_module, with groups of its own for what this object has",
                      op, i, group.size(), known.size() - count, ours.size()));
    }
    found.push_back(i);
  }
  if (known.size() == ours.size()) return found;
  throw std::invalid_argument(
      fmt::format("FusedAdamW::{}: the optimizer has {} parameters, of which {} are among the {} here; make it from "
                  "the same tensors, after parallelize_module",
                  op, theirs.size(), known.size(), ours.size()));
}

const torch::optim::AdamWOptions& options_of(const torch::optim::AdamW& optimizer, std::size_t group) {
  return static_cast<const torch::optim::AdamWOptions&>(optimizer.param_groups()[group].options());
}

// Returns the options that these groups of `optimizer` have, or LibTorch's own if there are no groups.
torch::optim::AdamWOptions only_options(const torch::optim::AdamW& optimizer, const std::vector<std::size_t>& groups) {
  if (groups.empty()) return static_cast<const torch::optim::AdamWOptions&>(optimizer.defaults());
  for (const std::size_t i : groups) {
    if (options_of(optimizer, i) == options_of(optimizer, groups.front())) continue;
    throw std::invalid_argument(
        fmt::format("FusedAdamW::take_state: group {} of the optimizer has other options than group {}; this class has "
                    "one group, so make one for each",
                    i, groups.front()));
  }
  return options_of(optimizer, groups.front());
}

// Checks that each state of `ours` has the tensors that a step with its options would have made.
void check_states(const torch::optim::AdamW& optimizer, const std::set<const void*>& ours, bool amsgrad) {
  for (const auto& [parameter, each] : optimizer.state()) {
    if (!ours.contains(parameter)) continue;
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(*each);
    if (state.exp_avg().defined() && state.exp_avg_sq().defined() && (!amsgrad || state.max_exp_avg_sq().defined())) {
      continue;
    }
    throw std::invalid_argument(
        "FusedAdamW::take_state: the optimizer lacks a moment of a parameter: its options, such as amsgrad, are not "
        "those of its steps; give it the options that it had when it made its state");
  }
}

}  // namespace

FusedAdamW::FusedAdamW(const std::vector<at::Tensor>& parameters, const FusedAdamWOptions& options)
    : options_(options) {
  check_options(options);
  check_parameters(parameters);
  using Key = std::tuple<uint64_t, at::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Key, std::size_t> group_of;
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : parameters) {
    const Key key{is_dtensor(p) ? mesh_of(p).id() : 0, p.scalar_type(), p.device().type(), p.device().index()};
    const auto [found, is_new] = group_of.emplace(key, groups_.size());
    const at::TensorOptions numbers = at::TensorOptions(at::kFloat).device(p.device());
    // A GPU's kernel reads the rate as float32.
    const at::TensorOptions rates = p.is_cpu() ? numbers.dtype(at::kDouble) : numbers;
    if (is_new) groups_.push_back({.states = {}, .lr = at::full({}, options.lr, rates)});
    const at::Tensor value = p.detach();
    groups_[found->second].states.push_back({.parameter = p,
                                             .moment = at::zeros_like(value),
                                             .square = at::zeros_like(value),
                                             .largest = options.amsgrad ? at::zeros_like(value) : at::Tensor(),
                                             .steps = at::zeros({}, numbers)});
  }
}

void FusedAdamW::step() {
  const at::NoGradGuard no_grad;
  for (const Group& group : groups_) {
    std::vector<at::Tensor> parameters, gradients, moments, squares, largest, steps;
    for (const State& each : group.states) {
      if (!each.parameter.grad().defined()) continue;
      parameters.push_back(each.parameter);
      gradients.push_back(in_order_of(each.parameter, each.parameter.grad()));
      moments.push_back(each.moment);
      squares.push_back(each.square);
      if (options_.amsgrad) largest.push_back(each.largest);
      steps.push_back(each.steps);
    }
    if (parameters.empty()) continue;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, moments, squares, largest, steps, group.lr, options_.beta1, options_.beta2,
                      options_.weight_decay, options_.eps, options_.amsgrad, /*maximize=*/false);
  }
}

void FusedAdamW::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  for (const Group& group : groups_) {
    for (const State& each : group.states) {
      at::Tensor& gradient = each.parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
      } else {
        gradient.detach_().zero_();
      }
    }
  }
}

void FusedAdamW::set_lr(double lr) {
  FusedAdamWOptions changed = options_;
  changed.lr = lr;
  check_options(changed);
  options_ = changed;
  for (const Group& group : groups_) group.lr.fill_(lr);
}

std::vector<at::Tensor> FusedAdamW::parameters() const {
  std::vector<at::Tensor> out;
  for (const Group& group : groups_) {
    for (const State& each : group.states) out.push_back(each.parameter);
  }
  return out;
}

std::set<const void*> FusedAdamW::addresses() const {
  std::set<const void*> out;
  for (const at::Tensor& each : parameters()) out.insert(each.unsafeGetTensorImpl());
  return out;
}

void FusedAdamW::give_state(torch::optim::AdamW& optimizer) const {
  const std::set<const void*> ours = addresses();
  for (const std::size_t i : groups_of(optimizer, ours, "give_state")) {
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[i].options())
        .lr(options_.lr)
        .betas({options_.beta1, options_.beta2})
        .eps(options_.eps)
        .weight_decay(options_.weight_decay)
        .amsgrad(options_.amsgrad);
  }
  for (const void* const each : ours) optimizer.state().erase(const_cast<void*>(each));
  for (const Group& group : groups_) {
    std::vector<at::Tensor> counts;
    for (const State& each : group.states) counts.push_back(each.steps);
    const at::Tensor steps = at::stack(counts).cpu();  // one wait for all of a group
    for (std::size_t i = 0; i < group.states.size(); ++i) {
      const State& each = group.states[i];
      const auto step = static_cast<int64_t>(steps[static_cast<int64_t>(i)].item<float>());
      if (step == 0) continue;
      auto state = std::make_unique<torch::optim::AdamWParamState>();
      state->step(step);
      state->exp_avg(each.moment);
      state->exp_avg_sq(each.square);
      state->max_exp_avg_sq(each.largest);
      optimizer.state()[each.parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }
}

void FusedAdamW::take_state(const torch::optim::AdamW& optimizer) {
  const std::set<const void*> ours = addresses();
  const torch::optim::AdamWOptions theirs = only_options(optimizer, groups_of(optimizer, ours, "take_state"));
  if (theirs.amsgrad() != options_.amsgrad) {
    throw std::invalid_argument(
        fmt::format("FusedAdamW::take_state: amsgrad is {} in the optimizer and {} here; make both alike",
                    theirs.amsgrad(), options_.amsgrad));
  }
  check_states(optimizer, ours, options_.amsgrad);
  const at::NoGradGuard no_grad;
  options_ = {.lr = theirs.lr(),
              .beta1 = std::get<0>(theirs.betas()),
              .beta2 = std::get<1>(theirs.betas()),
              .eps = theirs.eps(),
              .weight_decay = theirs.weight_decay(),
              .amsgrad = theirs.amsgrad()};
  for (const Group& group : groups_) {
    group.lr.fill_(options_.lr);
    for (const State& each : group.states) {
      const auto found = optimizer.state().find(each.parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) {
        for (const at::Tensor& t : {each.moment, each.square, each.largest, each.steps}) {
          if (t.defined()) t.zero_();
        }
        continue;
      }
      const auto& state = static_cast<const torch::optim::AdamWParamState&>(*found->second);
      each.steps.fill_(state.step());
      each.moment.copy_(state.exp_avg());
      each.square.copy_(state.exp_avg_sq());
      if (options_.amsgrad) each.largest.copy_(state.max_exp_avg_sq());
    }
  }
}

}  // namespace tessera

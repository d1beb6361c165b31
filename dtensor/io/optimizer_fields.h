#pragma once

#include <string>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

// Lists the state and options of torch::optim's classes, once for saving and for loading. A visitor has, for state,
//   counter(name, int64_t&), number(name, double&)
//   of_parameter(name, Tensor&): has the parameter's shape, always defined
//   optional_of_parameter(name, Tensor&): the same, may be undefined
//   free(name, Tensor&): of its own shape, may be undefined
//   list(name, std::deque<Tensor>&)
// and for options number, counter, flag(name, bool&), and counter and text for std::optional.
// Source: the public members in torch/optim/*.h of LibTorch 2.11.
namespace tessera {

template <typename Visitor>
void visit_state(torch::optim::SGDParamState& state, Visitor& visitor) {
  visitor.of_parameter("momentum_buffer", state.momentum_buffer());
}

template <typename AdamLikeState, typename Visitor>
void visit_adam_state(AdamLikeState& state, Visitor& visitor) {
  visitor.counter("step", state.step());
  visitor.of_parameter("exp_avg", state.exp_avg());
  visitor.of_parameter("exp_avg_sq", state.exp_avg_sq());
  visitor.optional_of_parameter("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <typename Visitor>
void visit_state(torch::optim::AdamParamState& state, Visitor& visitor) {
  visit_adam_state(state, visitor);
}
template <typename Visitor>
void visit_state(torch::optim::AdamWParamState& state, Visitor& visitor) {
  visit_adam_state(state, visitor);
}

template <typename Visitor>
void visit_state(torch::optim::RMSpropParamState& state, Visitor& visitor) {
  visitor.counter("step", state.step());
  visitor.of_parameter("square_avg", state.square_avg());
  visitor.optional_of_parameter("momentum_buffer", state.momentum_buffer());
  visitor.optional_of_parameter("grad_avg", state.grad_avg());
}

template <typename Visitor>
void visit_state(torch::optim::AdagradParamState& state, Visitor& visitor) {
  visitor.counter("step", state.step());
  visitor.of_parameter("sum", state.sum());
}

// Skips `al`, which each step fills before it reads it.
template <typename Visitor>
void visit_state(torch::optim::LBFGSParamState& state, Visitor& visitor) {
  visitor.counter("func_evals", state.func_evals());
  visitor.counter("n_iter", state.n_iter());
  visitor.number("t", state.t());
  visitor.number("prev_loss", state.prev_loss());
  visitor.free("d", state.d());
  visitor.free("H_diag", state.H_diag());
  visitor.free("prev_flat_grad", state.prev_flat_grad());
  visitor.list("old_dirs", state.old_dirs());
  visitor.list("old_stps", state.old_stps());
  visitor.list("ro", state.ro());
}

template <typename Visitor>
void visit_options(torch::optim::SGDOptions& options, Visitor& visitor) {
  visitor.number("lr", options.lr());
  visitor.number("momentum", options.momentum());
  visitor.number("dampening", options.dampening());
  visitor.number("weight_decay", options.weight_decay());
  visitor.flag("nesterov", options.nesterov());
}

template <typename AdamLikeOptions, typename Visitor>
void visit_adam_options(AdamLikeOptions& options, Visitor& visitor) {
  visitor.number("lr", options.lr());
  visitor.number("beta1", std::get<0>(options.betas()));
  visitor.number("beta2", std::get<1>(options.betas()));
  visitor.number("eps", options.eps());
  visitor.number("weight_decay", options.weight_decay());
  visitor.flag("amsgrad", options.amsgrad());
}
template <typename Visitor>
void visit_options(torch::optim::AdamOptions& options, Visitor& visitor) {
  visit_adam_options(options, visitor);
}
template <typename Visitor>
void visit_options(torch::optim::AdamWOptions& options, Visitor& visitor) {
  visit_adam_options(options, visitor);
}

template <typename Visitor>
void visit_options(torch::optim::RMSpropOptions& options, Visitor& visitor) {
  visitor.number("lr", options.lr());
  visitor.number("alpha", options.alpha());
  visitor.number("eps", options.eps());
  visitor.number("weight_decay", options.weight_decay());
  visitor.number("momentum", options.momentum());
  visitor.flag("centered", options.centered());
}

template <typename Visitor>
void visit_options(torch::optim::AdagradOptions& options, Visitor& visitor) {
  visitor.number("lr", options.lr());
  visitor.number("lr_decay", options.lr_decay());
  visitor.number("weight_decay", options.weight_decay());
  visitor.number("initial_accumulator_value", options.initial_accumulator_value());
  visitor.number("eps", options.eps());
}

template <typename Visitor>
void visit_options(torch::optim::LBFGSOptions& options, Visitor& visitor) {
  visitor.number("lr", options.lr());
  visitor.counter("max_iter", options.max_iter());
  visitor.counter("max_eval", options.max_eval());
  visitor.number("tolerance_grad", options.tolerance_grad());
  visitor.number("tolerance_change", options.tolerance_change());
  visitor.counter("history_size", options.history_size());
  visitor.text("line_search_fn", options.line_search_fn());
}

}  // namespace tessera

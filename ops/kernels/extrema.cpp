// The largest and smallest elements of a tensor or of what is scattered into one, and norms of infinite order, have
// their derivative where an element equals the result. Backward compares the two. Of a sum that is pending it would
// reduce the terms a second time, perhaps in another order: then no element might equal the result, and the gradient be
// 0 / 0. So such a sum is reduced once, above autograd, and autograd saves what the result was taken from.

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/decision.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// A maximum or a minimum is one of the terms, in whatever order they are reduced.
bool is_rounded(const Placement& p) {
  if (!p.is_partial()) return false;
  const ReduceOp op = p.reduction().op();
  return op != ReduceOp::kMax && op != ReduceOp::kMin;
}

// Says whether a derivative of the call will be taken that compares `given` with the result, for which it would be
// reduced once more.
bool is_compared(const at::IValue& given) {
  if (!given.isTensor() || !is_dtensor(given.toTensor())) return false;
  const Spec& spec = spec_of(given.toTensor());
  return spec.partial && std::ranges::any_of(spec.placements, is_rounded);
}
bool is_differentiated(const at::IValue& given) {
  if (!given.isTensor()) return false;
  const at::Tensor& t = given.toTensor();
  return t.defined() && ((t.requires_grad() && c10::GradMode::is_enabled()) || detail::has_tangent(t));
}

// Says whether the call computes extrema: by its name, its order or its reduction.
bool is_extremum(const c10::OperatorHandle& op, const Stack& stack) {
  const std::size_t n = op.schema().arguments().size();
  if (const int reduce = argument(op, "reduce"); reduce >= 0) {
    const std::string& name = torch::jit::peek(stack, static_cast<std::size_t>(reduce), n).toStringRef();
    return name == "amax" || name == "amin";
  }
  const int order = std::max(argument(op, "p"), argument(op, "ord"));
  if (order < 0) return true;
  const at::IValue& p = torch::jit::peek(stack, static_cast<std::size_t>(order), n);
  return p.isDouble() && std::isinf(p.toDouble());
}

// Returns the argument `given` in the layout that the operator's rule would bring it to.
at::Tensor reduced(const c10::OperatorHandle& op, Stack& stack, const at::Tensor& given) {
  const dispatch::OpTraits traits(op);
  const dispatch::Call call = dispatch::read_call(op, traits, stack);
  const dispatch::DecisionPtr decision = dispatch::decide(call);
  const auto same = [&](const dispatch::TensorArg& entry) { return entry.tensor->is_same(given); };
  const auto index = std::ranges::find_if(call.tensors, same) - call.tensors.begin();
  const Placements to = without_partial(decision->inputs.at(static_cast<std::size_t>(index))->placements);
  if (decision->communicates) {
    detail::implicit_communication(traits.name, [&] {
      return fmt::format("; its gradient needs {} reduced, which would go to {}", to_string(given), to_string(to));
    });
  }
  const World::Scope scope(mesh_of(given).world(), op.schema().name().c_str());
  return redistribute(given, to);
}

// Reduces those of the call's arguments `reducible` that are pending, if a derivative compares them, and goes on with
// LibTorch's own autograd kernel. The arguments of which derivatives are taken are the first and those.
void reduce_first(const c10::OperatorHandle& op, Stack& stack, std::initializer_list<std::size_t> reducible) {
  const std::size_t n = op.schema().arguments().size();
  const auto arg = [&](std::size_t i) -> at::IValue& { return torch::jit::peek(stack, i, n); };
  const bool differentiated = is_differentiated(arg(0)) ||
                              std::ranges::any_of(reducible, [&](std::size_t i) { return is_differentiated(arg(i)); });
  if (differentiated && is_extremum(op, stack)) {
    for (const std::size_t i : reducible) {
      if (is_compared(arg(i))) arg(i) = reduced(op, stack, arg(i).toTensor());
    }
  }
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, stack);
}

void extremum(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  reduce_first(op, *stack, {0});
}

// In scatter_reduce and index_reduce the derivative compares the first argument and the source, which is argument 3.
void scattered_extremum(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  reduce_first(op, *stack, {0, 3});
}
void extremum_in_place(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  reduce_first(op, *stack, {3});
}

constexpr std::array kExtrema = {"amax",
                                 "amin",
                                 "max",
                                 "min",
                                 "linalg_vector_norm",
                                 "norm.Scalar",
                                 "norm.ScalarOpt_dim",
                                 "norm.ScalarOpt_dim_dtype",
                                 "norm.ScalarOpt_dtype"};

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  for (const char* name : kExtrema) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&extremum>());
  for (const char* name : {"scatter_reduce.two", "index_reduce"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&scattered_extremum>());
  for (const char* name : {"scatter_reduce_.two", "index_reduce_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&extremum_in_place>());
}

}  // namespace
}  // namespace tessera

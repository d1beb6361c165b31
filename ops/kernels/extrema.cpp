// The largest and smallest elements of a tensor, and its norms of infinite order, have their derivative where an
// element equals the result. Backward compares the two. Of a sum that is pending it would reduce the terms a second
// time, perhaps in another order: then no element might equal the result, and the gradient be 0 / 0. So such a sum is
// reduced once, above autograd, and autograd saves what the result was taken from.

#include <algorithm>
#include <array>
#include <cmath>

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

// Says whether a derivative will compare the call's tensor with its result, and the tensor is pending.
bool is_compared(const c10::OperatorHandle& op, const Stack& stack) {
  const std::size_t n = op.schema().arguments().size();
  const at::Tensor& self = torch::jit::peek(stack, 0, n).toTensor();
  const Spec& spec = *detail::meta(self).spec;
  if (!spec.partial || std::ranges::none_of(spec.placements, is_rounded)) return false;
  if (!(self.requires_grad() && c10::GradMode::is_enabled()) && !detail::has_tangent(self)) return false;
  const int order = std::max(argument(op, "p"), argument(op, "ord"));
  if (order < 0) return true;
  const at::IValue& p = torch::jit::peek(stack, static_cast<std::size_t>(order), n);
  return p.isDouble() && std::isinf(p.toDouble());
}

// Returns `self`, the call's tensor, in the layout that the operator's rule would bring it to.
at::Tensor reduced(const c10::OperatorHandle& op, Stack& stack, const at::Tensor& self) {
  const dispatch::OpTraits traits(op);
  const dispatch::DecisionPtr decision = dispatch::decide(dispatch::read_call(op, traits, stack));
  const Placements& to = decision->inputs.at(0)->placements;
  if (decision->communicates) {
    detail::implicit_communication(traits.name, [&] {
      return fmt::format("; its gradient needs {} reduced, which would go to {}", to_string(self), to_string(to));
    });
  }
  const World::Scope scope(mesh_of(self).world(), op.schema().name().c_str());
  return redistribute(self, to);
}

void extremum(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  if (is_compared(op, *stack)) {
    at::IValue& self = torch::jit::peek(*stack, 0, op.schema().arguments().size());
    self = reduced(op, *stack, self.toTensor());
  }
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);  // LibTorch's own autograd kernel
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
}

}  // namespace
}  // namespace tessera

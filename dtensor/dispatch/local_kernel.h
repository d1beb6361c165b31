#pragma once

#include <string_view>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tessera/dtensor/random/draws.h"
#include "tessera/dtensor/spec.h"

namespace tessera {

// What a local kernel knows of the call it stands in for: the operator, and how its tensors are laid out (inputs after
// redistribution, flattened in schema order; nullptr for plain and absent ones), and what it draws from if it is random.
struct LocalCall {
  const c10::OperatorHandle& op;
  const std::vector<SpecPtr>& inputs;
  const std::vector<SpecPtr>& outputs;
  detail::DrawKey draw = {};
};

// Computes an operator on this rank's pieces where the operator itself would not give the piece of the result, e.g. a lookup
// in a part of the vocabulary. The stack holds the local arguments and takes the local results, as for callBoxed.
using LocalKernel = void (*)(const LocalCall& call, torch::jit::Stack& stack);

// Registered under the name that a rule's Strategy gives; `communicates` when it runs a collective itself. Returns true, for use at
// namespace scope.
bool register_local_kernel(std::string_view name, LocalKernel kernel, bool communicates = false);
struct LocalKernelEntry {
  LocalKernel kernel = nullptr;
  bool communicates = false;
};
// Throws std::logic_error on a name that nobody registered.
LocalKernelEntry find_local_kernel(std::string_view name);

// An operator written in terms of others on DTensors. Returns false to leave the call to rules; the stack must then be as it was.
using Decomposition = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
bool register_decomposition(std::string_view op_name, Decomposition decomposition);
Decomposition find_decomposition(std::string_view op_name);  // nullptr when there is none

}  // namespace tessera

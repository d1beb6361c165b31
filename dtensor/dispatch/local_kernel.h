#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/ops/rules/halos.h"

namespace tessera {

// Rows that were fetched from other ranks before the kernel runs: the inputs that `halos` names are on the stack as
// halos.needed() says; `held` are this rank's own pieces of them.
struct Fetched {
  const rules::Halos& halos;
  std::vector<at::Tensor> held;
};

// What a local kernel knows of the call it stands in for: the operator, and how its tensors are laid out (inputs after
// redistribution, flattened in schema order; nullptr for plain and absent ones), and what it draws from if it is
// random.
struct LocalCall {
  const c10::OperatorHandle& op;
  const std::vector<SpecPtr>& inputs;
  const std::vector<SpecPtr>& outputs;
  detail::DrawKey draw = {};
  const Fetched* fetched = nullptr;  // where the operator's rule has halos, and a strategy that cuts them was chosen
};

// Computes an operator on this rank's pieces where the operator itself would not give the piece of the result, e.g. a
// lookup in a part of the vocabulary. The stack holds the local arguments and takes the local results, as for
// callBoxed.
using LocalKernel = void (*)(const LocalCall& call, torch::jit::Stack& stack);

// `communicates`: it runs a collective itself. `writes_out`: it leaves results in the out= tensors among its arguments.
// `rearranges`: its results may lie in memory otherwise than the operator's.
struct LocalKernelTraits {
  bool communicates = false;
  bool writes_out = false;
  bool rearranges = false;
};

// Registered under the name that a rule's Strategy gives, while the program loads: the table has no lock. Returns true,
// for use at namespace scope. Throws std::logic_error where there is one of that name.
bool register_local_kernel(std::string_view name, LocalKernel kernel, LocalKernelTraits traits = {});
struct LocalKernelEntry {
  LocalKernel kernel = nullptr;
  LocalKernelTraits traits = {};
};
// Throws std::logic_error on a name that nobody registered.
LocalKernelEntry find_local_kernel(std::string_view name);

// A view as the result of `op`: itself, a clone for the operators that copy, "squeeze_copy" and its kin.
at::Tensor own_if_copy(const c10::OperatorHandle& op, const at::Tensor& view);

// An operator written in terms of others on DTensors. Returns false to leave the call to rules; the stack must then be
// as it was.
using Decomposition = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
// The calls that a decomposition is asked about.
enum class DecomposedCalls {
  kAll,
  kInInference,             // under InferenceMode
  kBesidePlainInInference,  // those of them that have a plain tensor among DTensors
};
// `op_name`: as rules are named, "add" for add_ too; or "t_" for one that writes in place alone.
struct DecompositionEntry {
  Decomposition run = nullptr;
  DecomposedCalls calls = DecomposedCalls::kAll;
};
bool register_decomposition(std::string_view op_name, Decomposition decomposition,
                            DecomposedCalls calls = DecomposedCalls::kAll);
// Of an operator by its name in the schema, "aten::add_"; `run` is nullptr where there is none.
DecompositionEntry find_decomposition(const std::string& op_name);

}  // namespace tessera

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

// Describes rows that were fetched from other ranks before the kernel runs. The inputs that `halos` names are on the
// stack with the rows of halos.needed(); `held` are this rank's own pieces of them.
struct Fetched {
  const rules::Halos& halos;
  std::vector<at::Tensor> held;
};

// Describes the call that a local kernel stands in for: the operator, the layouts of its tensors (inputs after
// redistribution, lists flattened, in schema order; nullptr for plain and absent ones), and the key that it draws from
// if it is random.
struct LocalCall {
  const c10::OperatorHandle& op;
  const std::vector<SpecPtr>& inputs;
  const std::vector<SpecPtr>& outputs;
  detail::DrawKey draw = {};
  const Fetched* fetched = nullptr;  // set if the chosen strategy cuts a dimension for which the rule has halos
};

// Computes an operator on this rank's pieces where the operator itself would not give the piece of the result, for
// example a lookup in a part of the vocabulary. The stack holds the local arguments and gets the local results, as for
// callBoxed.
using LocalKernel = void (*)(const LocalCall& call, torch::jit::Stack& stack);

// `communicates`: the kernel runs a collective itself, so that every rank of the mesh runs it; the others are not run
// where all results' pieces are empty. `writes_out`: it writes results to the out= tensors among its
// arguments. `rearranges`: its results may have other strides than the operator's. `makes_contiguous`: it calls the
// operator on inputs that it makes contiguous, and does nothing else, so that it is left out where all of them are.
// `check`: refuses arguments before the kernel runs. Every rank of the mesh runs it, also one whose pieces are empty,
// and what it throws is thrown on every rank alike: the job goes on. Where ranks look at unlike arguments it calls
// World::guard.
struct LocalKernelTraits {
  bool communicates = false;
  bool writes_out = false;
  bool rearranges = false;
  bool makes_contiguous = false;
  LocalKernel check = nullptr;
};

// Registers a kernel under the name that a rule's Strategy gives. Call it while the program loads, since the table has
// no lock. Returns true, for use at namespace scope. Throws std::logic_error if the name is taken.
bool register_local_kernel(std::string_view name, LocalKernel kernel, LocalKernelTraits traits = {});
struct LocalKernelEntry {
  LocalKernel kernel = nullptr;
  LocalKernelTraits traits = {};
};
// Returns the kernel of this name. Throws std::logic_error if there is none.
LocalKernelEntry find_local_kernel(std::string_view name);

// Returns `view` as the result of `op`: itself, or a clone for operators that copy ("squeeze_copy" and others).
at::Tensor own_if_copy(const c10::OperatorHandle& op, const at::Tensor& view);

// Runs an operator in terms of other operators on DTensors. Returns false to leave the call to the rules; on the stack
// it may then have replaced arguments by others of the same value and sizes alone.
using Decomposition = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
// Says for which calls a decomposition is tried.
enum class DecomposedCalls {
  kAll,
  kInInference,             // under InferenceMode
  kBesidePlainInInference,  // under InferenceMode; a call without a plain tensor may skip it
};
// Holds a decomposition, and the calls for which it is tried.
struct DecompositionEntry {
  Decomposition run = nullptr;
  DecomposedCalls calls = DecomposedCalls::kAll;
};
// Registers a decomposition. `op_name` is a rule's name, "add" for add_ too; or a name such as "t_" for an in-place
// operator alone. Call it while the program loads, since the table has no lock. Returns false if the name is taken.
bool register_decomposition(std::string_view op_name, Decomposition decomposition,
                            DecomposedCalls calls = DecomposedCalls::kAll);
// Returns the decomposition of an operator by its schema name, "aten::add_"; `run` is nullptr if there is none.
DecompositionEntry find_decomposition(const std::string& op_name);

}  // namespace tessera

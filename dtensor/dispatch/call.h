#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/core/tensor.h"

namespace tessera::dispatch {

// One tensor among an operator's arguments, where it stands, and what the dispatcher takes it for.
struct TensorArg {
  std::size_t arg = 0;    // schema argument
  std::size_t index = 0;  // in that argument's list, 0 for a single tensor
  const at::Tensor* tensor = nullptr;
  const Spec* spec = nullptr;  // nullptr: absent, or a plain tensor without dimensions
};

// What the schema says, found once an operator.
struct OpTraits {
  std::string name;  // "aten::add_"
  std::string key;   // "add", as rules are named
  std::size_t num_args = 0;
  std::vector<bool> number_arg;           // a Scalar whose type matters to the rule and whose value does not
  std::vector<std::size_t> written_args;  // tensors written in place, in schema order
  std::vector<std::size_t> out_args;      // those of them that are out= arguments
  std::vector<int> written_results;       // for each written argument the result that it is, -1 where it is none
  int generator_arg = -1;
  int dropout_arg = -1;         // a probability called dropout_p: at 0 nothing is drawn
  bool random = false;          // draws numbers
  bool scales = false;          // multiplies or divides its tensors by numbers
  bool keeps_contract = false;  // returns the same logical tensor or a part of it: a contract goes along
  bool view = false;            // the result aliases an input
  bool as_real = false;         // view_as_real: a lazily conjugated piece has no such view
  bool changes_shape_in_place = false;

  explicit OpTraits(const c10::OperatorHandle& op);
};

// A call while it is being dispatched. The tensors point into the stack.
struct Call {
  const c10::OperatorHandle& op;
  const OpTraits& traits;
  torch::jit::Stack& stack;
  std::size_t base = 0;  // of the arguments on the stack
  c10::SmallVector<TensorArg, 6> tensors;
  const Spec* lead = nullptr;               // of the first DTensor: its mesh is the call's
  c10::SmallVector<SpecPtr, 2> replicated;  // keeps specs of plain tensors that count as replicated
  std::vector<at::Tensor> gathered;         // keeps parameters that were gathered for the call
  ContractPtr derived;                      // of results that follow from pieces of such parameters alone

  std::span<const at::IValue> args() const { return {stack.data() + base, traits.num_args}; }
  at::IValue& arg(std::size_t i) const { return stack[base + i]; }
  // Whether the operator writes that tensor in place.
  bool writes(const TensorArg& entry) const;
};

// Whether terms of a sum would be multiplied or divided by a zero or a number that is not finite: each alone, 0 * inf
// or 1 / 0 - 1 / 0, they would not add up to what their sum gives. A number is a Scalar, or a tensor of one element in
// host memory that every rank has; one on a GPU is not read.
bool has_zero_or_nonfinite_number(const Call& call);

// What to say of `plain` in the place of a DTensor where an operator writes in place: an optimizer's state may be older
// than the parameters' layouts. "" elsewhere.
std::string old_state_hint(const Call& call, const at::Tensor& plain);

// Finds the tensors. Throws std::invalid_argument when DTensors lie on different meshes, or a plain tensor of one
// dimension or more is among them outside ImplicitReplication and backward, naming operator, shapes, placements and the
// ways out. Under Checked the plain ones are compared over the mesh, unless they are just taken for equal.
enum class PlainTensors : uint8_t { kCompared, kTaken };
Call read_call(const c10::OperatorHandle& op, const OpTraits& traits, torch::jit::Stack& stack,
               PlainTensors plain_tensors = PlainTensors::kCompared);

}  // namespace tessera::dispatch

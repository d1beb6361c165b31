#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/ops/rules/rule.h"

namespace tessera::dispatch {

// Describes one tensor among an operator's arguments: its position, and the layout that the dispatcher takes it to
// have.
struct TensorArg {
  std::size_t arg = 0;    // index of the schema argument
  std::size_t index = 0;  // index in that argument's list, 0 for a single tensor
  const at::Tensor* tensor = nullptr;
  const Spec* spec = nullptr;  // nullptr: absent, or a plain tensor without dimensions
};

// Holds what follows from the operator's schema; computed once per operator.
struct OpTraits {
  std::string name;       // "aten::add_"
  std::string rule_name;  // "add", by which find_rule finds the operator's rule
  std::size_t num_args = 0;
  std::vector<bool> number_arg;           // per argument: a Scalar of which the library's rule uses only the type
  std::vector<std::size_t> written_args;  // arguments written in place or as out=, in schema order
  std::vector<std::size_t> out_args;      // those of written_args that are out= arguments
  std::vector<int> written_results;       // for each written argument, the index of the result that it is, or -1
  int generator_arg = -1;
  int dropout_arg = -1;          // the argument dropout_p: if it is 0, nothing is drawn
  int divisor_arg = -1;          // the tensor by which others are divided
  bool random = false;           // draws random numbers
  bool uses_numbers = false;     // the library's rule may use the values of Scalars, and not their types alone
  bool scales = false;           // multiplies or divides its tensors by numbers
  bool keeps_contract = false;   // returns the same logical tensor or a part of it, which gets its contract
  bool view = false;             // the result aliases an input
  bool is_view_as_real = false;  // view_as_real: a lazily conjugated piece has no such view
  bool changes_shape_in_place = false;

  explicit OpTraits(const c10::OperatorHandle& op);

  bool is_of_libtorch() const { return name.starts_with("aten::"); }
  // Returns the index of the result that a written argument is, or -1.
  int written_result(std::size_t arg) const;

  // Says whether a decision holds for one value of each Scalar alone. A user's rule may be registered at any time.
  bool decides_by_numbers() const {
    return uses_numbers || (rules::any_replaced.load(std::memory_order_relaxed) && rules::is_replaced(rule_name));
  }
};

// Holds a plain tensor that an operator writes in backward, and the DTensor over the same memory that the call has in
// its place.
struct WrittenPlain {
  std::size_t arg;
  at::Tensor tensor;
  at::Tensor over;
};

// Describes a call while it is dispatched. `tensors` point into the stack.
struct Call {
  const c10::OperatorHandle& op;
  const OpTraits& traits;
  torch::jit::Stack& stack;
  std::size_t base = 0;  // where the arguments begin on the stack
  c10::SmallVector<TensorArg, 6> tensors;
  const Spec* first_spec = nullptr;         // the first DTensor's Spec; its mesh is the call's
  c10::SmallVector<SpecPtr, 2> replicated;  // owns the specs of plain tensors that count as replicated
  std::vector<at::Tensor> gathered;         // owns the parameters that were gathered for the call
  std::vector<WrittenPlain> written_plain;  // see return_plain()
  ContractPtr contract_from_parameters;  // contract of results computed from pieces of parameters alone; see gather.h

  std::span<const at::IValue> args() const { return {stack.data() + base, traits.num_args}; }
  at::IValue& arg(std::size_t i) const { return stack[base + i]; }
  // Says whether the operator writes that tensor, in place or as out=.
  bool writes(const TensorArg& entry) const;
};

// Says whether the call draws random numbers: a dropout of probability 0 draws none.
bool draws(const Call& call);

// Says whether the terms of a pending sum would be multiplied or divided by a zero or a non-finite number. The results,
// each computed from one term (0 * inf, or 1 / 0 - 1 / 0), would not add up to the result for the sum. A number is a
// Scalar, or a tensor of one element that every rank has. These are not read, and may be zero: a number on a GPU; a
// plain tensor, which may differ from rank to rank; a divisor that is pending or cut.
bool has_zero_or_nonfinite_number(const Call& call);

// Puts the plain tensors that the call has written (Call::written_plain) in the place of the results. One with
// dimensions becomes a DTensor, since LibTorch's formulas fill zeros of their own with a gradient. One without stays
// plain: it may be the caller's, in which a hook adds up numbers.
void return_plain(const Call& call);

// Returns the path of the first argument that a style gave a contract, or nullptr.
const std::string* contract_path(const Call& call);

// Returns a hint for an error about `plain`, where an operator writes in place and expects a DTensor: an optimizer's
// state may be older than the parameters' layouts. Returns "" elsewhere.
std::string old_state_hint(const Call& call, const at::Tensor& plain);

// Throws std::invalid_argument since a result would be written to a tensor of other sizes, which LibTorch would resize.
// `or_else` ends the text with what else to do.
[[noreturn]] void refuse_sizes(const std::string& op, at::IntArrayRef result, at::IntArrayRef written,
                               std::string_view or_else = "");

// Finds the call's tensors. Throws std::invalid_argument when DTensors are on different meshes, or when a plain tensor
// of one dimension or more is among them outside ImplicitReplication and backward, or is on another device; the text
// names the operator, shapes, placements and what to do. Under Checked, plain tensors are compared over the mesh
// outside backward; with kTaken they are taken to be equal. In backward, a DTensor takes the place of a plain tensor
// that the call writes, not in a list.
enum class PlainTensors : uint8_t { kCompared, kTaken };
Call read_call(const c10::OperatorHandle& op, const OpTraits& traits, torch::jit::Stack& stack,
               PlainTensors plain_tensors = PlainTensors::kCompared);

}  // namespace tessera::dispatch

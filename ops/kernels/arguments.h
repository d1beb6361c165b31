#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

// Helpers for decompositions, which get an operator's call on top of a stack, and for local kernels.
namespace tessera {

// Says whether numbers of this dtype are added in float32: in their own, sums may overflow where means do not.
inline bool has_16_bits(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }
// Returns numbers of 16 bits in float32, and others as they are.
inline at::Tensor widened(const at::Tensor& t) { return has_16_bits(t.scalar_type()) ? t.to(at::kFloat) : t; }

// Returns a copy of the call's arguments; they stay on the stack.
torch::jit::Stack take_args(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
// Returns the index of the argument `name`, or -1 if the operator has none.
int argument(const c10::OperatorHandle& op, const char* name);
// Replaces the call's arguments on the stack by results.
void give(const c10::OperatorHandle& op, torch::jit::Stack& stack, torch::jit::Stack results);
void give(const c10::OperatorHandle& op, torch::jit::Stack& stack, at::IValue result);

// Returns whether the operator writes an argument, in place or as out=.
bool writes(const c10::OperatorHandle& op);

// Returns whether a value is a DTensor of which ranks hold different pieces or terms, or a list with such a DTensor.
bool spread(const at::IValue& value);
bool any_spread(const torch::jit::Stack& args);

// Returns the integers in a tensor that an operator uses as sizes. They are read on the host, as item() reads a number.
// A DTensor whose ranks hold different pieces runs the collectives of full_tensor.
std::vector<int64_t> read_numbers(const at::Tensor& t);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

// What decompositions share: the call on top of a stack.
namespace tessera {

// Its arguments.
torch::jit::Stack take_args(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
// The place of an argument by its name, -1 where there is none.
int argument(const c10::OperatorHandle& op, const char* name);
// The results in their place.
void give(const c10::OperatorHandle& op, torch::jit::Stack& stack, torch::jit::Stack results);
void give(const c10::OperatorHandle& op, torch::jit::Stack& stack, at::IValue result);

// Whether it writes an argument, in place or out=.
bool writes(const c10::OperatorHandle& op);

// A DTensor of which ranks hold different pieces or terms; in lists, any.
bool spread(const at::IValue& value);
bool any_spread(const torch::jit::Stack& args);

// The whole numbers of a tensor that an operator takes for sizes: read on the host, as item() reads one number. Of a
// DTensor that is spread over ranks this runs the collectives of full_tensor.
std::vector<int64_t> read_numbers(const at::Tensor& t);

}  // namespace tessera

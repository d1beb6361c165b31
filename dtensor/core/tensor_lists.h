#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

// Reads and replaces tensors inside one boxed argument or result: a tensor, a Tensor[] or a Tensor?[].
// IValue::isOptionalTensorList compares the address of a list's type, which identifies only lists made in C++:
// TorchScript makes a type of its own for each list. These functions compare the types' structure, so they treat lists
// of both origins alike. They are internal to the library.
namespace tessera::detail {

// Says whether the value is a Tensor[] or a Tensor?[], also when it is empty.
bool is_tensor_list(const at::IValue& value);

// Calls `see` with each tensor and its index in the list (0 for a single tensor); an absent element is passed as an
// undefined tensor. Does nothing for other values.
void each_tensor(const at::IValue& value, c10::function_ref<void(const at::Tensor&, std::size_t)> see);

// Replaces each tensor by what `make` returns for it and its index; a list is replaced by a new list. In a Tensor?[],
// an absent element is passed as an undefined tensor, and an undefined result becomes an absent element.
void replace_tensors(at::IValue& value, c10::function_ref<at::Tensor(const at::Tensor&, std::size_t)> make);

}  // namespace tessera::detail

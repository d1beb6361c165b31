#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

// Tensors inside one boxed argument or result: a tensor, a Tensor[] or a Tensor?[]. IValue::isOptionalTensorList
// compares a list's type with one by its address, which holds for lists made in C++ alone; TorchScript makes a type of
// its own for each list. These functions compare what the types say, so that lists of every origin are read alike. The
// library's own.
namespace tessera::detail {

// Says whether the value is a Tensor[] or a Tensor?[]; an empty list counts too.
bool is_tensor_list(const at::IValue& value);

// Calls `see` with each tensor and its index in the list, 0 for a tensor alone; absent elements are undefined tensors.
// Other values hold none.
void each_tensor(const at::IValue& value, c10::function_ref<void(const at::Tensor&, std::size_t)> see);

// Replaces each tensor by what `make` gives for it and its index; a list is replaced by a new one. In a Tensor?[]
// absent elements come as undefined tensors, and what `make` gives undefined is absent.
void replace_tensors(at::IValue& value, c10::function_ref<at::Tensor(const at::Tensor&, std::size_t)> make);

}  // namespace tessera::detail

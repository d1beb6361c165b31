#include "tessera/dtensor/core/tensor_lists.h"

#include <optional>
#include <utility>

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

namespace tessera::detail {
namespace {

// Compares the type's structure where its address does not settle the question. For most other lists the first element
// settles it, without a copy of the type.
bool is_optional_tensor_list(const at::IValue& value) {
  if (value.isOptionalTensorList()) return true;
  if (!value.isList()) return false;
  const c10::ArrayRef<at::IValue> elements = value.toListRef();
  if (!elements.empty() && !elements[0].isTensor() && !elements[0].isNone()) return false;
  return value.toList().elementType()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

const at::Tensor& tensor_of(const at::IValue& element) {
  static const at::Tensor absent;
  return element.isNone() ? absent : element.toTensor();
}

}  // namespace

bool is_tensor_list(const at::IValue& value) { return value.isTensorList() || is_optional_tensor_list(value); }

void each_tensor(const at::IValue& value, c10::function_ref<void(const at::Tensor&, std::size_t)> see) {
  if (value.isTensor()) return see(value.toTensor(), 0);
  if (!is_tensor_list(value)) return;
  std::size_t index = 0;
  for (const at::IValue& element : value.toListRef()) see(tensor_of(element), index++);
}

void replace_tensors(at::IValue& value, c10::function_ref<at::Tensor(const at::Tensor&, std::size_t)> make) {
  std::size_t index = 0;
  if (value.isTensor()) {
    value = make(value.toTensor(), 0);
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    list.reserve(value.toListRef().size());
    for (const at::IValue& element : value.toListRef()) list.push_back(make(element.toTensor(), index++));
    value = std::move(list);
  } else if (is_optional_tensor_list(value)) {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(value.toListRef().size());
    for (const at::IValue& element : value.toListRef()) {
      at::Tensor made = make(tensor_of(element), index++);
      list.push_back(made.defined() ? std::make_optional(std::move(made)) : std::nullopt);
    }
    value = std::move(list);
  }
}

}  // namespace tessera::detail

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>

#include "tessera/styles/compute_dtype.h"

namespace tessera::detail {

// Says how a module is called that parallelize_module has laid out.
struct Calling {
  ComputeDtype compute;
  std::string split_mesh;  // names the mesh where several ranks split the batch and plain inputs are refused
};

// Sees the arguments of one call. On a mesh whose ranks split the batch, plain tensors alone would count as the same on
// every rank, and the gradients of parameters without a style would not be reduced.
class BatchCheck {
 public:
  void see(const at::Tensor& t);
  void see(const at::Scalar& /*a number*/) {}
  void see(const at::Generator& /*no tensor*/) {}
  template <class T>
  void see(const std::vector<T>& arguments) {
    for (const auto& each : arguments) see(each);
  }
  template <class T>
  void see(const c10::ArrayRef<T>& arguments) {
    for (const auto& each : arguments) see(each);
  }
  template <class T>
  void see(const std::optional<T>& argument) {
    if (argument) see(*argument);
  }
  template <class A, class B>
  void see(const std::pair<A, B>& arguments) {
    see(arguments.first);
    see(arguments.second);
  }
  template <class... T>
  void see(const std::tuple<T...>& arguments) {
    std::apply([&](const auto&... each) { (see(each), ...); }, arguments);
  }
  // A pointer counts as what it leads to where that is a tensor. Strings, and what can be copied as bytes (numbers,
  // enums, other pointers), hold no tensor. An argument of another type may hold DTensors.
  template <class T>
  void see(const T& argument) {
    if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
      see(static_cast<const at::Tensor&>(argument));
    } else if constexpr (std::is_pointer_v<T> && std::is_convertible_v<T, const at::Tensor*>) {
      if (argument != nullptr) see(*static_cast<const at::Tensor*>(argument));
    } else if constexpr (requires {
                           argument.get();
                           *argument;
                         }) {
      see(argument.get());  // a smart pointer
    } else if constexpr (!std::is_trivially_copyable_v<T> && !std::is_convertible_v<const T&, std::string_view>) {
      passes_ = true;
    }
  }
  void see_unknown() { passes_ = true; }

  // Throws std::invalid_argument if a plain tensor of one or more dimensions was seen and no DTensor.
  void check(const std::string& split_mesh) const;

 private:
  bool passes_ = false;                        // an argument is a DTensor or may hold one
  std::optional<std::vector<int64_t>> plain_;  // the sizes of the first plain tensor
};

// Throws std::invalid_argument: the root has hooks, and the handle's type has a forward that runs none.
[[noreturn]] void refuse_without_hooks();

}  // namespace tessera::detail

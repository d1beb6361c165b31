#pragma once

#include <concepts>
#include <stdexcept>
#include <type_traits>

#include <torch/nn/module.h>

namespace tessera::detail {

// Returns the module in what parallelize_module takes: a module, a holder, a shared_ptr or an AnyModule. Throws
// std::invalid_argument where there is none.
template <class Handle>
torch::nn::Module& root_of(Handle&& handle) {
  torch::nn::Module* root = nullptr;
  if constexpr (std::derived_from<std::remove_cvref_t<Handle>, torch::nn::Module>) {
    root = &handle;
  } else if constexpr (requires { handle.ptr(); }) {
    root = handle.is_empty() ? nullptr : handle.ptr().get();
  } else {
    root = handle.get();
  }
  if (root == nullptr) throw std::invalid_argument("parallelize_module: the module is a null pointer; make it first");
  return *root;
}

}  // namespace tessera::detail

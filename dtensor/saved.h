#pragma once

#include <utility>

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera::detail {

// Holds a value in a form that autograd's saved_data can store.
template <class T>
struct Held : torch::CustomClassHolder {
  explicit Held(T v) : value(std::move(v)) {}
  T value;
};

// Returns the value called `name` that an autograd node keeps, made on first use.
template <class T>
T& saved(torch::autograd::AutogradContext* ctx, const char* name) {
  at::IValue& held = ctx->saved_data[name];
  if (!held.isCapsule()) held = at::IValue::make_capsule(c10::make_intrusive<Held<T>>(T{}));
  return static_cast<Held<T>*>(held.toCapsule().get())->value;
}

// Returns `gradient` as a DTensor of `like`'s mesh; a plain one, such as autograd's zeros, counts as replicated. Under
// create_graph its history goes on.
at::Tensor as_dtensor(const at::Tensor& gradient, const Spec& like);

// Says whether somebody else holds the memory of a gradient. Autograd may keep what a leaf gets as its .grad, which
// must share no memory with another tensor; under create_graph it copies.
bool is_shared(const at::Tensor& gradient);

}  // namespace tessera::detail

#pragma once

#include <mutex>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "tessera/dtensor/random/draws.h"

namespace tessera::detail {

// Returns a new generator of the device, with a seed made of `key`, for operators that take one. Generators with equal
// keys draw equal numbers, whatever other threads draw meanwhile.
at::Generator generator_of(const c10::Device& device, DrawKey key);

// Is held around operators whose own kernels draw from the default generator, since they take none: while it is alive,
// the device's default generator has a seed made of `key`; afterwards its state is restored. Ranks with equal keys draw
// equal numbers.
//
// Invariant: one rank of this process holds it at a time, since LibTorch's default generators belong to the process. A
// thread that draws plain numbers meanwhile takes some of the operator's.
class DrawGuard {
 public:
  DrawGuard(const c10::Device& device, DrawKey key);
  ~DrawGuard();
  DrawGuard(const DrawGuard&) = delete;
  DrawGuard& operator=(const DrawGuard&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> drawing_;
  at::Generator generator_;
  at::Tensor saved_;
};

}  // namespace tessera::detail

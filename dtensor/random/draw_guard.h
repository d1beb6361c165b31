#pragma once

#include <mutex>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "tessera/dtensor/random/draws.h"

namespace tessera::detail {

// For operators whose own kernels draw: while it lives, the device's default generator is a fresh one with a seed made
// of `key`; afterwards it is as it was. Ranks whose keys are alike draw alike.
class DrawGuard {
 public:
  DrawGuard(const c10::Device& device, DrawKey key);
  ~DrawGuard();
  DrawGuard(const DrawGuard&) = delete;
  DrawGuard& operator=(const DrawGuard&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> drawing_;  // one rank of this process draws at a time
  at::Generator generator_;
  at::Tensor saved_;
};

}  // namespace tessera::detail

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

// Short names for the arguments of samples.
namespace tessera::testing::made {

inline at::Tensor x(const std::vector<int64_t>& sizes) { return at::randn(sizes, at::kDouble); }
inline at::Tensor ints(const std::vector<int64_t>& sizes, int64_t below) {
  return at::randint(below, sizes, at::kLong);
}
inline at::Tensor bools(const std::vector<int64_t>& sizes) { return at::rand(sizes) < 0.5; }
inline c10::IValue none() { return {}; }

}  // namespace tessera::testing::made

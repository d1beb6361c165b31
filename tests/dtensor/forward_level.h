#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/_unpack_dual.h>
#include <torch/csrc/autograd/forward_grad.h>

namespace tessera::testing {

// A level of forward-mode derivatives, which ends with it.
class ForwardLevel {
 public:
  ForwardLevel() : index_(torch::autograd::ForwardADLevel::get_next_idx()) {}
  ~ForwardLevel() { torch::autograd::ForwardADLevel::release_idx(index_); }
  ForwardLevel(const ForwardLevel&) = delete;
  ForwardLevel& operator=(const ForwardLevel&) = delete;

 private:
  uint64_t index_;
};

inline at::Tensor dual(const at::Tensor& primal, const at::Tensor& tangent) {
  return at::_make_dual(primal, tangent, 0);
}
// Undefined if there is none.
inline at::Tensor tangent_of(const at::Tensor& t) { return std::get<1>(at::_unpack_dual(t, 0)); }

}  // namespace tessera::testing

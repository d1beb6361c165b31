#pragma once

#include <cstdint>
#include <mutex>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/_unpack_dual.h>
#include <torch/csrc/autograd/forward_grad.h>

namespace tessera::testing {

// A level of forward-mode derivatives. LibTorch allows one in a process, so ranks that are threads share it: it ends
// with the last of them.
class ForwardLevel {
 public:
  ForwardLevel() {
    const std::lock_guard lock(mutex_);
    if (users_++ == 0) index_ = torch::autograd::ForwardADLevel::get_next_idx();
  }
  ~ForwardLevel() {
    const std::lock_guard lock(mutex_);
    if (--users_ == 0) torch::autograd::ForwardADLevel::release_idx(index_);
  }
  ForwardLevel(const ForwardLevel&) = delete;
  ForwardLevel& operator=(const ForwardLevel&) = delete;

 private:
  inline static std::mutex mutex_;
  inline static int64_t users_ = 0;
  inline static uint64_t index_ = 0;
};

inline at::Tensor dual(const at::Tensor& primal, const at::Tensor& tangent) {
  return at::_make_dual(primal, tangent, 0);
}
// Undefined if there is none.
inline at::Tensor tangent_of(const at::Tensor& t) { return std::get<1>(at::_unpack_dual(t, 0)); }

}  // namespace tessera::testing

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

// Makes memory in which several pieces lie one after the other, so that one collective sends them as they are.
class BucketMemory {
 public:
  // `sizes` has the sizes of each piece; all have the dtype and the device of `options`.
  BucketMemory(std::vector<std::vector<int64_t>> sizes, const at::TensorOptions& options);

  // Returns the part of piece `i`, which is contiguous. The memory is made by the first call after release().
  at::Tensor part(std::size_t i);
  // Forgets the memory, which the parts keep.
  void release() { memory_.reset(); }

 private:
  std::vector<std::vector<int64_t>> sizes_;
  std::vector<int64_t> begins_;
  int64_t numel_ = 0;
  at::TensorOptions options_;
  at::Tensor memory_;
};

}  // namespace tessera

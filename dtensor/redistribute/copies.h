#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "tessera/gpu_kernels/interface.h"

namespace tessera {

// Describes a copy between parts of two tensors of one dtype, which do not overlap. Offsets and strides are in
// elements, from each tensor's first one. Refers to what it is made of.
struct StridedCopy {
  const at::Tensor& to;
  int64_t to_offset;
  const std::vector<int64_t>& to_strides;
  const at::Tensor& from;
  int64_t from_offset;
  const std::vector<int64_t>& from_strides;
  const std::vector<int64_t>& sizes;
};

void copy_part(const StridedCopy& part);

// Returns the copy as a kernel of ours is told it, with tensors of any device, or nullopt where that has no room for
// its dimensions or its words.
std::optional<gpu::Copy> copy_request(const StridedCopy& part);

// Takes a copy, to make it now or later.
using TakeCopy = c10::function_ref<void(const StridedCopy& part)>;

// Makes several copies, of which none may write what another one reads or writes. On a GPU with our kernels they are
// collected and made by one launch; elsewhere each is made when it is added.
class Copies {
 public:
  void operator()(const StridedCopy& part);
  // Starts what was collected, on the current stream of the tensors' device; they must live until then. Call it once,
  // after the last copy.
  void run();

 private:
  std::vector<gpu::Copy> collected_;
  at::Tensor on_;  // one of the tensors
};

}  // namespace tessera

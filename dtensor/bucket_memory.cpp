#include "tessera/dtensor/bucket_memory.h"

#include <utility>

#include <c10/util/accumulate.h>

#include "tessera/mesh/core/reused_memory.h"

namespace tessera {

BucketMemory::BucketMemory(std::vector<std::vector<int64_t>> sizes, const at::TensorOptions& options)
    : sizes_(std::move(sizes)), options_(options) {
  for (const std::vector<int64_t>& each : sizes_) {
    begins_.push_back(numel_);
    numel_ += c10::multiply_integers(each);
  }
}

at::Tensor BucketMemory::part(std::size_t i) {
  if (!memory_.defined()) memory_ = reused_empty({numel_}, options_);
  return memory_.narrow(0, begins_[i], c10::multiply_integers(sizes_[i])).view(sizes_[i]);
}

}  // namespace tessera

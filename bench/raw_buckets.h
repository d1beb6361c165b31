#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera::bench {

// Averages gradients over data-parallel ranks as one would by hand: each gradient is copied into a bucket of at most 25
// MiB, and a full bucket is all-reduced while backward goes on. `.grad` views the bucket in the end.
class RawBuckets {
 public:
  RawBuckets(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::Backend> group);
  RawBuckets(const RawBuckets&) = delete;
  RawBuckets& operator=(const RawBuckets&) = delete;
  // Waits for the buckets of the backward pass that has run, and sets `.grad`.
  void finish();

 private:
  struct Slot {
    at::Tensor parameter;
    at::Tensor view;
  };
  struct Bucket {
    at::Tensor flat;
    std::vector<Slot> slots;
    std::size_t missing = 0;  // slots without a gradient
    c10::intrusive_ptr<c10d::Work> work;
  };
  void add_bucket(std::vector<at::Tensor> parameters);
  void take(Bucket& bucket, std::size_t slot, const at::Tensor& gradient);

  c10::intrusive_ptr<c10d::Backend> group_;
  std::vector<Bucket> buckets_;
};

}  // namespace tessera::bench

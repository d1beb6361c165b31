#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera::bench {

// Adds up gradients over data-parallel ranks as one would by hand: each gradient is copied into a bucket of at most 25
// MiB, which `.grad` views from then on, and a full bucket is all-reduced while backward goes on.
class RawBuckets {
 public:
  RawBuckets(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::Backend> group);
  RawBuckets(const RawBuckets&) = delete;
  RawBuckets& operator=(const RawBuckets&) = delete;
  // Waits for the buckets of the backward pass that has run.
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
  void take(Bucket& bucket, const Slot& slot);

  c10::intrusive_ptr<c10d::Backend> group_;
  std::vector<Bucket> buckets_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // they die with their hooks if nobody keeps them
};

}  // namespace tessera::bench

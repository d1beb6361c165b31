#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera::bench {

// Cuts the parameters of one part of a model over data-parallel ranks, as one would by hand: all of them are one flat
// tensor, of which each rank holds a shard. It is gathered by one all-gather while its part computes, and the gradients
// are added up by one reduce-scatter: over Gloo an all-to-all and a sum, since Gloo's own is an all-reduce.
class RawShards {
 public:
  RawShards(const std::vector<at::Tensor>& values, c10::intrusive_ptr<c10d::Backend> group);
  RawShards(const RawShards&) = delete;
  RawShards& operator=(const RawShards&) = delete;

  // Returns the parameters, which have values from finish_gather() until free().
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Returns this rank's shard, which the optimizer updates.
  const at::Tensor& shard() const { return shard_; }

  // Starts to gather, unless that has been done or begun.
  void begin_gather();
  void finish_gather();
  void free();
  // Starts to reduce the gradients of parameters(), and frees these.
  void begin_reduce();
  // Waits, and sets the gradient of shard().
  void finish_reduce();

 private:
  c10::intrusive_ptr<c10d::Backend> group_;
  at::Tensor shard_, full_;
  std::vector<at::Tensor> parameters_;
  bool is_gathered_ = false;
  c10::intrusive_ptr<c10d::Work> gathering_, reducing_;
  at::Tensor gradient_, received_;
};

// Returns x. Backward calls `before_rest` when x's gradient is known.
at::Tensor with_backward_call(const at::Tensor& x, std::function<void()> before_rest);

}  // namespace tessera::bench

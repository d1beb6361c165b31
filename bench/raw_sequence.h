#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// These functions are what one writes by hand for sequence parallelism: plain LibTorch and c10d's own collectives.
// Activations are [batch, sequence, features]; a rank's part is cut from the sequence. A `group` of nullptr is one
// rank.
namespace tessera::bench {

using Backend = c10::intrusive_ptr<c10d::Backend>;

// Returns the sum of `terms` over all ranks, of which each rank gets one n-th of the first dimension.
at::Tensor summed_rows(const at::Tensor& terms, const Backend& group);
// Gathers the sequence by one all-gather; backward sums the gradient and cuts it by one reduce-scatter.
at::Tensor gather_sequence(const at::Tensor& x, const Backend& group);
// Sums the terms of all ranks and cuts the sequence by one reduce-scatter; backward is one all-gather. Over Gloo a
// reduce-scatter is an all-to-all and a sum, since Gloo's own is an all-reduce.
at::Tensor sum_sequence(const at::Tensor& x, const Backend& group);
// Returns the mean cross entropy of logits [rows, vocabulary / ranks], by two small all-reduces.
at::Tensor cross_entropy_of_cut(const at::Tensor& logits, const at::Tensor& targets, const Backend& group);

}  // namespace tessera::bench

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

#include "tessera/bench/raw_buckets.h"
#include "tessera/bench/raw_sequence.h"
#include "tessera/bench/raw_shards.h"
#include "tessera/bench/train_case.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::bench {

// Trains the model as one would by hand with plain LibTorch and c10d's own collectives: tensor parallelism with the
// block's own collectives, gradients in buckets along dp, and with `zero` each block's parameters as one flat tensor
// that is gathered ahead of its use.
class RawTraining {
 public:
  // `mesh` is {dp, tp}.
  RawTraining(const TrainCase& size, const DeviceMesh& mesh);
  // Trains one step: forward, backward, clipping, AdamW.
  TrainStep step();

 private:
  using Weights = std::span<const at::Tensor>;
  at::Tensor embed(Weights root) const;
  at::Tensor block(const at::Tensor& x, Weights weights) const;
  at::Tensor loss(const at::Tensor& x, Weights root) const;
  at::Tensor norm(const at::Tensor& x, Weights weights, std::size_t at) const;

  double step_of_pieces();
  double step_of_shards();
  void sum_over_tp();
  // Returns the norm before.
  double clip();
  double sum_over_dp(const at::Tensor& loss) const;

  const TrainCase size_;
  Backend dp_, tp_;  // nullptr for one rank
  int64_t tp_rank_ = 0;
  at::Tensor ids_, targets_;

  std::vector<at::Tensor> parameters_;              // this rank's pieces
  std::vector<at::Tensor> cut_, whole_;             // those of parameters_ that tp cuts, and the others
  std::unique_ptr<RawBuckets> buckets_;             // nullptr with zero and on one rank of dp
  std::vector<std::unique_ptr<RawShards>> shards_;  // with zero: of what is outside the blocks, then of each block
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

}  // namespace tessera::bench

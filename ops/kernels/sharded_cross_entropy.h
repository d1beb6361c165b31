#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// What label smoothing of a gives each of K classes.
enum class SmoothingFormula {
  kPyTorch,   // 1 - a to the target, and a / K to every class
  kMegatron,  // 1 - a to the target, and a / (K - 1) to every other class
};

struct CrossEntropyOptions {
  at::Tensor weight;  // [K], of all classes, plain: what a target of each class counts for
  int64_t ignore_index = -100;
  at::Reduction::Reduction reduction =
      at::Reduction::Mean;     // or Sum, None; the mean is over the weights of the targets that count
  double label_smoothing = 0;  // in [0, 1]
  SmoothingFormula smoothing = SmoothingFormula::kPyTorch;
  // K. Default: as many classes on every rank as here. Uneven classes, which lie as torch.chunk has it, need it; and
  // with it whole logits, which are no piece, are refused.
  std::optional<int64_t> classes;
};

// The cross entropy of logits whose classes are cut over the ranks: logits [*, K of this rank], plain; target [*] of
// class numbers in [0, K), plain and alike on every rank. Gives [*], or [] when reduced, alike on every rank, in the
// logits' dtype, float32 for half and bfloat16. K is the number of all classes everywhere, in the smoothing too.
//
// Sums and exponentials are float32 (float64 of float64), some rows at a time. Kept for backward are the logits alone;
// the gradient, in the logits' dtype, is the one other buffer of their size, new at every backward. create_graph takes
// a differentiable path. Collectives over the one dimension of `mesh`, of n rows of logits: one all_reduce (max) of n
// numbers and one (sum) of 2 n + 1, with smoothing 3 n + 1. Backward: none. On a GPU the host waits for the check of
// the target, and without `classes` for theirs. Throws std::invalid_argument, on every rank of the mesh alike, on a
// target that is no class and not ignore_index, a smoothing outside [0, 1], undefined tensors, DTensors, tensors on
// another device than the mesh's, and a mesh of several dimensions or without this rank. Logits that do not fit the
// target or are no piece of the classes, which this rank alone may have, fail the job; without `classes` so do a target
// that is no class and a weight of another size.
// Source: Shoeybi et al., Megatron-LM (2019), section 3; torch::nn::functional::cross_entropy.
at::Tensor sharded_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                 const CrossEntropyOptions& options = {});

}  // namespace tessera

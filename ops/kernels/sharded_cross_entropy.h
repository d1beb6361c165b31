#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Says how label smoothing with parameter a distributes probability over K classes.
enum class SmoothingFormula {
  kPyTorch,   // the target gets 1 - a, and every class a / K
  kMegatron,  // the target gets 1 - a, and every other class a / (K - 1)
};

struct CrossEntropyOptions {
  at::Tensor weight = {};  // [K], for all classes, a plain tensor: the weight of a target of each class
  int64_t ignore_index = -100;
  at::Reduction::Reduction reduction =
      at::Reduction::Mean;     // or Sum, None; the mean is over the weights of the targets that count
  double label_smoothing = 0;  // in [0, 1]
  SmoothingFormula smoothing = SmoothingFormula::kPyTorch;
  // This is K. By default every rank is assumed to have as many classes as this one. It is needed for uneven classes,
  // which are laid out by torch.chunk. If it is given, logits of all classes are refused where a piece is expected.
  std::optional<int64_t> classes = {};
};

// Computes the cross entropy of logits whose classes are cut over the ranks. `logits` is a plain tensor [*, this rank's
// classes]. `target` is a plain tensor [*] of class numbers in [0, K), the same on every rank. Returns [*], or [] if
// reduced, the same on every rank, in the logits' dtype (float32 for half and bfloat16). K counts all classes, also in
// the smoothing. (On GPUs results of ranks whose logits differ in their layout in memory may differ by rounding.)
//
// Sums and exponentials are computed in float32 (float64 for float64), some rows at a time. Only the logits are kept
// for backward. The gradient, in the logits' dtype, is the one other buffer of their size, allocated in every backward.
// Logits of more than two dimensions that do not flatten to a matrix are copied first, in both. With create_graph,
// backward uses a differentiable implementation instead. On a GPU without label smoothing, one kernel of ours
// (gpu_kernels/) reads the logits once for all sums, and one writes the gradient.
//
// Collectives over the one dimension of `mesh`, for n rows of logits: one all_reduce (max) of n numbers and one (sum)
// of 2 n + 1, or 3 n + 1 with smoothing. Backward runs none. The host waits for no GPU: there the checks of the
// target and, without `classes`, of the number of classes end the process's use of the GPU (mesh/core/device_checks.h).
//
// Throws std::invalid_argument, on every rank of the mesh alike, on a target on the CPU that is neither a class nor
// ignore_index, a smoothing outside [0, 1], undefined tensors, DTensors, tensors on another device than the mesh's, and
// a mesh of several dimensions or without this rank. Logits that do not fit the target or are no piece of the classes
// may be wrong on this rank alone, so they fail the job. Without `classes`, so do a target that is no class and a
// weight of the wrong size; a target does so too where the world has more ranks than the mesh. Source: Shoeybi et al.,
// Megatron-LM (2019), section 3; torch::nn::functional::cross_entropy.
at::Tensor sharded_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                 const CrossEntropyOptions& options = {});

}  // namespace tessera

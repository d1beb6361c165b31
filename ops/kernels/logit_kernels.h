#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/placement/partition.h"

// Kernels of our own for the cross entropy of logits whose classes are cut over ranks. Two read a rank's logits once,
// and need no buffer besides a few numbers per row; the others do in one launch what is done for each row. Without
// them, on other devices, for other layouts and with label smoothing, LibTorch's operators do the work
// (cross_entropy_rows.h).
namespace tessera::detail {

// Says whether a GPU's kernels do the cross entropy of `logits` [*, k], after they are flattened to [n, k]. They check
// the classes too.
bool takes_logits(const at::Tensor& logits);

// Holds the classes that rows are to have: each one from 0 to `classes` - 1, or `ignored`.
struct RowTargets {
  at::Tensor of_row;  // int64 [n], adjacent
  int64_t ignored = 0;
  int64_t classes = 0;
  Interval mine;  // the classes of this rank's columns
};

// Holds, for each row of a rank's logits, its greatest one, the sum of exp(x - greatest), and the logit of its class,
// or 0 where that is another rank's: [n] each, float64 for float64 and else float32. Where all logits are -inf, or
// there is none, the sum is 0.
struct RowSums {
  at::Tensor greatest;
  at::Tensor exps;
  at::Tensor picked;
};
RowSums row_sums(const at::Tensor& logits, const RowTargets& targets);

// Returns [2n + 1]: a rank's terms of the sums over all ranks, relative to `of_all` [n], the greatest logits of all
// ranks, and then of the logits of the rows' classes; last the number of the rank's classes.
at::Tensor row_terms(const RowSums& sums, const at::Tensor& of_all, const RowTargets& targets);

// Returns [2, n]: the loss and the weight of each row, given the sums over all ranks of what row_terms() returns.
// `weight` [n] has 0 for ignored rows; undefined, it stands for ones.
at::Tensor row_losses(const at::Tensor& sums, const at::Tensor& weight, const RowTargets& targets);

// Holds what a row's gradient depends on, besides its logits, in the dtype of RowSums.
struct RowFactors {
  at::Tensor of_all;    // [n]
  at::Tensor exps;      // [n], of all ranks
  at::Tensor weight;    // as for row_losses
  at::Tensor gradient;  // of the losses: one number, or [n]
  at::Tensor total;     // of the weights, by which a mean divides; else undefined
};

// Returns the gradient of the losses by `logits`, row-major.
at::Tensor logits_gradient(const at::Tensor& logits, const RowFactors& factors, const RowTargets& targets);

// Return what these kernels are told, with tensors of any device. The first and the last need logits of a floating
// dtype whose columns are adjacent in memory.
gpu::LogitSums sums_request(const at::Tensor& logits, const RowTargets& targets, const RowSums& to);
gpu::LogitTerms terms_request(const RowSums& sums, const at::Tensor& of_all, const RowTargets& targets,
                              const at::Tensor& out);
gpu::LogitLosses losses_request(const at::Tensor& sums, const at::Tensor& weight, const RowTargets& targets,
                                const at::Tensor& out);
gpu::LogitGradient gradient_request(const at::Tensor& logits, const RowFactors& factors, const RowTargets& targets,
                                    const at::Tensor& out);

}  // namespace tessera::detail

#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/gpu_kernels/interface.h"

// Kernels of our own for the cross entropy of logits whose classes are cut over ranks. Each reads a rank's logits once,
// and needs no buffer besides one or a few numbers per row. Without them, on other devices and for other layouts,
// LibTorch's operators do the work (sharded_cross_entropy.cpp).
namespace tessera::detail {

// Holds, for each row of a rank's logits, its greatest one, the sum of exp(x - greatest), and the logit in a column:
// [n] each, float64 for float64 and else float32. Where all logits are -inf the sum is 0.
struct RowSums {
  at::Tensor greatest;
  at::Tensor exps;
  at::Tensor picked;
};

// Returns what a GPU makes of `logits` [n, k], n and k > 0, and of the columns `column` [n]; nullopt where it cannot.
std::optional<RowSums> row_sums_on_gpu(const at::Tensor& logits, const at::Tensor& column);

// Sets `exps` and `picked` to a rank's terms of the sums over all ranks: relative to `greatest`, the greatest logit of
// all ranks, and 0 where `here` says that the column is another rank's.
void set_terms(const RowSums& sums, const at::Tensor& greatest, const at::Tensor& here, const at::Tensor& exps,
               const at::Tensor& picked);

// Holds the factors of a row's gradient, [n] numbers each in the dtype of RowSums:
//   exp(x - greatest) * on_exps, and on_column more in its column; 0 where kept is 0.
struct RowFactors {
  at::Tensor column;
  at::Tensor greatest;
  at::Tensor on_exps;
  at::Tensor on_column;
  at::Tensor kept;
};

// Makes a GPU write the gradient to `out`, which is row-major, and returns true; returns false where it cannot.
bool gradient_on_gpu(const at::Tensor& logits, const RowFactors& factors, const at::Tensor& out);

// Return what these kernels are told, with tensors of any device, or nullopt where they cannot do it.
std::optional<gpu::LogitSums> sums_request(const at::Tensor& logits, const at::Tensor& column, const RowSums& to);
std::optional<gpu::LogitGradient> gradient_request(const at::Tensor& logits, const RowFactors& factors,
                                                   const at::Tensor& out);

}  // namespace tessera::detail

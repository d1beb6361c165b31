#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/partition.h"

// Computes by LibTorch's operators the losses of rows of logits whose classes are cut, and their gradients.
// sharded_cross_entropy.cpp checks calls, and makes an operator of these functions.
namespace tessera::cross_entropy {

inline constexpr const char* kName = "sharded_cross_entropy";

inline at::ScalarType sum_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// Holds one call, with its rows and classes counted.
//
// With x the logits, S = sum over classes of exp(x - m), m a row's greatest logit, w the classes' weights, t the
// target, and a the probability that smoothing spreads evenly over all classes:
//   loss = (1 - a) w_t (log S + m - x_t) + a / K * sum over k of w_k (log S + m - x_k)
struct Problem {
  std::optional<DeviceMesh> mesh;
  at::Tensor weight;  // [K] or undefined
  int64_t ignore_index = -100;
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  int64_t classes = 0;         // K
  bool classes_given = false;  // or else each rank took their number from its own
  Interval mine;               // this rank's classes
  double spread = 0;           // a
  bool by_kernels = false;     // of our own, on a GPU (logit_kernels.h)

  at::Tensor weight_here(const at::Tensor& like) const {
    return weight.defined() ? weight.slice(0, mine.begin, mine.end).to(sum_type(like.scalar_type())) : at::Tensor();
  }
};

// Holds what the computation needs of a row besides its logits.
struct Rows {
  at::Tensor target;  // its class, 0 where ignored
  at::Tensor weight;  // its weight: w_t, or 0 where ignored
  at::Tensor kept;    // 1, or 0 where ignored
  at::Tensor column;  // the index of the class in this rank's columns, 0 if it is on another rank
  at::Tensor here;    // whether this rank has the class
};

// Returns what belongs to a target of any sizes, its weight and `kept` in the dtype `type`.
Rows rows_of(const at::Tensor& target, const Problem& p, at::ScalarType type);

// Where each rank took the number of classes from its own: checks that all ranks together have that many, which is not
// so if classes are uneven.
void check_count(const at::Tensor& counted, const Problem& p);

// Holds sums over all classes of each row, [n] each.
struct Sums {
  at::Tensor greatest;  // m
  at::Tensor exps;      // S
  at::Tensor loss;
};

// Runs an all_reduce (max) of n numbers for logits [n, k], and one (sum) of 2n + 1, or 3n + 1 with smoothing.
Sums sums_of(const at::Tensor& logits, const Rows& rows, const Problem& p);

// Return the gradient by logits `x` [n, k] of what p.reduction makes of the losses, whose gradient is `grad`.
// The first one works on some rows at a time, with what sums_of() has found. The second one can be differentiated; it
// runs all_reduces anew.
at::Tensor gradient_in_parts(const at::Tensor& x, const at::Tensor& grad, const Rows& rows, const Problem& p,
                             const at::Tensor& greatest, const at::Tensor& exps);
at::Tensor differentiable_gradient(const at::Tensor& x, const at::Tensor& grad, const Rows& rows, const Problem& p);

}  // namespace tessera::cross_entropy

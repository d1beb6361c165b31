#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// torch::nn::init's orthogonal_, sparse_ and dirac_ for DTensors: the first two draw plain tensors inside, the third
// writes single elements, which a cut tensor has no view of. The others of torch::nn::init work on DTensors as they
// are. Drawn as dtensor/random.h says, one draw a call: the same bits however `t` is cut. No communication, and no rank
// holds the whole; work in memory of an eighth of it (orthogonal_) or of one column (sparse_). Also under ShardedInit.
// They throw std::invalid_argument on a plain tensor, on one of another number of dimensions or without floating point,
// and on a pending reduction.

// Rows, or columns where there are fewer, become orthonormal, uniformly distributed, times `gain`; dimensions behind
// the first count as one. Each rank computes the columns that it has parts of, from one Householder reflection a
// column. Source: Stewart, "The efficient generation of random orthogonal matrices", SIAM J. Numer. Anal. 17 (1980).
at::Tensor orthogonal_(at::Tensor t, double gain = 1);

// A matrix of normal numbers of that deviation, of which in each column ceil(sparsity * rows) are 0, drawn anew for
// each.
at::Tensor sparse_(at::Tensor t, double sparsity, double deviation = 0.01);

// Of a convolution's weight of 3 to 5 dimensions: 1 in the middle of each input channel's kernel in the output channel
// of its number, else 0.
at::Tensor dirac_(at::Tensor t);

}  // namespace tessera

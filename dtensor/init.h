#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// Do for DTensors what torch::nn::init's orthogonal_, sparse_ and dirac_ do for plain tensors. The first two of those
// draw plain tensors inside, and the third communicates for each element that it writes. The other functions of
// torch::nn::init work on DTensors unchanged.
// Each call is one draw as dtensor/random.h describes: the bits are the same with any sharding. None communicates, and
// no rank holds the whole; they need memory for an eighth of it (orthogonal_) or one column (sparse_). They also work
// under ShardedInit. They throw std::invalid_argument on a plain tensor, on a wrong number of dimensions, on a dtype
// that is not floating point, and on a pending reduction.

// Makes the rows (or columns, where there are fewer) orthonormal, uniformly distributed, times `gain`; dimensions
// behind the first count as one. Each rank computes the columns that it holds parts of, from one Householder reflection
// per column. Source: Stewart, "The efficient generation of random orthogonal matrices", SIAM J. Numer. Anal. 17
// (1980).
at::Tensor orthogonal_(at::Tensor t, double gain = 1);

// Fills a matrix with normal numbers of that standard deviation. In each column ceil(sparsity * rows) elements, drawn
// per column, are 0.
at::Tensor sparse_(at::Tensor t, double sparsity, double deviation = 0.01);

// Fills a convolution's weight of 3 to 5 dimensions: 1 in the middle of the kernel from each input channel to the
// output channel of the same index, else 0.
at::Tensor dirac_(at::Tensor t);

}  // namespace tessera

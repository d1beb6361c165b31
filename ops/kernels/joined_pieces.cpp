#include "tessera/ops/kernels/joined_pieces.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/std_mean.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

// Returns the dimension whose elements are farthest from each other in memory.
int64_t slowest_dim(const at::Tensor& t) {
  int64_t slowest = 0;
  for (int64_t d = 1; d < t.dim(); ++d) {
    if (t.size(d) > 1 && (t.size(slowest) == 1 || t.stride(d) > t.stride(slowest))) slowest = d;
  }
  return slowest;
}

// Returns the sum in float64 over `dims`. LibTorch would convert the whole tensor first on the CPU.
at::Tensor wide_sum(const at::Tensor& t, const std::vector<int64_t>& dims) {
  const at::ScalarType type = t.is_complex() ? at::kComplexDouble : at::kDouble;
  return sum_of_parts(t, dims, [&](const Part& part) { return part.of(t).sum(dims, /*keepdim=*/true, type); });
}

// The mean of equal elements is exactly these: a sum of numbers of fewer bits is exact in float64, and LibTorch's mean
// beside a variance adds differences.
Moments moments_of(const at::Tensor& piece, const std::vector<int64_t>& dims, int64_t count) {
  const bool is_complex = piece.is_complex();
  const bool is_double = c10::toRealValueType(piece.scalar_type()) == at::kDouble;
  const at::Tensor wide = widened(piece);
  at::Tensor mean, variance;
  if (count == 0) {
    mean = wide_sum(wide, dims);  // zeros
    variance = at::zeros_like(mean, at::kDouble);
  } else if (is_double) {
    std::tie(variance, mean) = at::var_mean(wide, dims, /*correction=*/0, /*keepdim=*/false);
  } else {
    mean = wide_sum(wide, dims) / static_cast<double>(count);
    // A variance may be too large or too small for float32 where the deviation is not. That of all elements is measured
    // from a rounded mean unless the mean is asked for.
    variance = std::get<0>(at::std_mean(wide, dims, /*correction=*/0, /*keepdim=*/false)).to(at::kDouble).square();
  }
  const auto elements = static_cast<double>(count);
  return {.mean = is_complex ? at::view_as_real(mean).reshape({-1, 2}) : mean.reshape({-1, 1}),
          .squares = variance.reshape({-1}) * elements,
          .count = at::full({1}, elements, variance.options())};
}

// Joins the moments of all ranks of a mesh of one dimension by one all_gather. With n_i elements, mean m_i and squares
// q_i in piece i, n elements in all and m_0 the mean of some piece:
//   m = m_0 + sum of n_i / n (m_i - m_0),  q = sum of q_i + n_i (m_i - m)^2
// so that equal elements have q = 0. This is the formula of T. F. Chan, G. H. Golub and R. J. LeVeque, Updating
// formulae and a pairwise algorithm for computing sample variances, 1979, for any number of pieces.
Moments joined_moments(const Moments& mine, const DeviceMesh& mesh) {
  const int64_t lines = mine.squares.size(0), numbers = mine.mean.numel();
  const at::Tensor sent = at::cat({mine.mean.reshape({-1}), mine.squares, mine.count});
  const at::Tensor all = all_gather(sent, mesh, 0);
  const at::Tensor counts = all.narrow(1, numbers + lines, 1);                                          // [n, 1]
  const at::Tensor means = all.narrow(1, 0, numbers).reshape({all.size(0), lines, mine.mean.size(1)});  // [n, L, K]
  const at::Tensor exists = counts > 0;
  const at::Tensor by_line = exists.unsqueeze(-1);
  const at::Tensor total = counts.sum(0);
  const at::Tensor weights = (counts / total.clamp_min(1)).unsqueeze(-1);
  const at::Tensor some = means.index_select(0, exists.to(at::kInt).argmax(0));  // [1, L, K]
  const auto weighted = [&](const at::Tensor& t) { return at::where(by_line, t * weights, 0).sum(0); };
  const at::Tensor near_some = some.squeeze(0) + weighted(means - some);
  const at::Tensor mean = at::where(near_some.isfinite(), near_some, weighted(means));
  const at::Tensor distances = (means - mean).square().sum(-1);  // [n, L]
  const at::Tensor squares = all.narrow(1, numbers, lines) + counts * distances;
  return {.mean = mean, .squares = at::where(exists, squares, 0).sum(0), .count = total};
}

}  // namespace

std::vector<int64_t> reduced_dims(const at::IValue& dim, int64_t ndim) {
  std::vector<int64_t> dims;
  if (dim.isInt()) dims.push_back(dim.toInt());
  if (dim.isIntList()) dims = dim.toIntVector();
  if (dims.empty()) {
    for (int64_t d = 0; d < ndim; ++d) dims.push_back(d);
  }
  for (int64_t& d : dims) d = d < 0 ? d + ndim : d;
  return dims;
}

int64_t reduced_count(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t d : dims) count *= sizes.at(static_cast<std::size_t>(d));
  return count;
}

DeviceMesh joining_mesh(const Spec& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> joining;
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement& p = spec.placements[i];
    if (p.is_shard() && std::ranges::find(dims, p.tensor_dim()) != dims.end()) {
      joining.push_back(static_cast<int64_t>(i));
    }
  }
  return spec.mesh.merged(joining);
}

at::Tensor joined(const at::Tensor& mine, const Spec& spec, const std::vector<int64_t>& dims, ReduceOp op) {
  return all_reduce(mine, joining_mesh(spec, dims), 0, op);
}

at::Tensor sum_of_parts(const at::Tensor& t, const std::vector<int64_t>& dims,
                        c10::function_ref<at::Tensor(const Part& part)> sum_of) {
  constexpr int64_t kPartBytes = 1 << 20;
  const int64_t dim = slowest_dim(t);
  const int64_t size = t.size(dim);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  const int64_t step = std::max<int64_t>(1, t.is_cpu() && bytes > 0 ? kPartBytes * size / bytes : size);
  const bool reduces = std::ranges::find(dims, dim) != dims.end();
  std::vector<at::Tensor> sums;  // one where they are added
  for (int64_t begin = 0; begin == 0 || begin < size; begin += step) {
    at::Tensor sum = sum_of({.dim = dim, .begin = begin, .end = std::min(size, begin + step)});
    if (reduces && !sums.empty()) {
      sums[0].add_(sum);
    } else {
      sums.push_back(std::move(sum));
    }
  }
  return sums.size() == 1 ? sums[0] : at::cat(sums, dim);
}

Moments moments_of_all(const at::Tensor& piece, const Spec& spec, const std::vector<int64_t>& dims) {
  return joined_moments(moments_of(piece, dims, reduced_count(spec.local_sizes, dims)), joining_mesh(spec, dims));
}

}  // namespace tessera

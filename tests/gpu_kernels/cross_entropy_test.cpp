#include "tessera/gpu_kernels/cross_entropy.h"

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/mesh/core/gpu_kernels.h"
#include "tessera/ops/kernels/logit_kernels.h"

using namespace tessera;
using tessera::detail::RowFactors;
using tessera::detail::RowSums;
using tessera::detail::RowTargets;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::ScalarType computed(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// Returns [rows, columns] of numbers whose first one is `before` numbers behind a multiple of 16 bytes, and whose rows
// are `gap` numbers farther apart than their columns need.
at::Tensor laid_out(const at::Tensor& values, at::ScalarType dtype, int64_t before, int64_t gap) {
  const int64_t rows = values.size(0), columns = values.size(1);
  const at::Tensor all = at::full({rows * (columns + gap) + before + 16}, 1e4, dtype);  // what is outside is great
  const at::Tensor out = all.as_strided({rows, columns}, {columns + gap, 1}, before);
  out.copy_(values);
  return out;
}

// Merges as a block of threads does: in each warp of 32 the lane at half the distance first, then the warps.
template <class C>
gpu::ExpSum<C> merged_in_warp(std::vector<gpu::ExpSum<C>> lanes) {
  for (std::size_t distance = lanes.size() / 2; distance > 0; distance /= 2) {
    for (std::size_t i = 0; i < distance; ++i) lanes[i] = gpu::merged(lanes[i], lanes[i + distance]);
  }
  return lanes[0];
}
template <class C>
gpu::ExpSum<C> merged_in_block(const std::vector<gpu::ExpSum<C>>& threads) {
  if (threads.size() < 32) {
    gpu::ExpSum<C> all;
    for (const gpu::ExpSum<C>& one : threads) all = gpu::merged(all, one);
    return all;
  }
  std::vector<gpu::ExpSum<C>> warps;
  for (std::size_t at = 0; at < threads.size(); at += 32) {
    warps.push_back(merged_in_warp(std::vector(threads.begin() + static_cast<std::ptrdiff_t>(at),
                                               threads.begin() + static_cast<std::ptrdiff_t>(at) + 32)));
  }
  return merged_in_warp(warps);
}

RowSums empty_sums(const at::Tensor& logits) {
  const auto options = logits.options().dtype(computed(logits.scalar_type()));
  const int64_t n = logits.size(0);
  return {.greatest = at::zeros({n}, options), .exps = at::zeros({n}, options), .picked = at::zeros({n}, options)};
}

// Returns targets of which `mine` are this rank's classes.
RowTargets targets_of(const at::Tensor& of_row, int64_t classes, Interval mine, int64_t ignored = -100) {
  return {.of_row = of_row, .ignored = ignored, .classes = classes, .mine = mine};
}

template <class T>
RowSums sums_by_threads(const at::Tensor& logits, const RowTargets& targets, int threads) {
  RowSums out = empty_sums(logits);
  const gpu::LogitSums request = tessera::detail::sums_request(logits, targets, out);
  for (int64_t row = 0; row < request.rows; ++row) {
    std::vector<gpu::ExpSum<gpu::Computed<T>>> sums;
    for (int thread = 0; thread < threads; ++thread) sums.push_back(gpu::sum_of_row<T>(request, row, thread, threads));
    gpu::store_sums<T>(request, row, merged_in_block(sums));
  }
  return out;
}
// Does so where all classes are on one rank, and the rows are to have those of `column`.
template <class T>
RowSums sums_by_threads(const at::Tensor& logits, const at::Tensor& column, int threads) {
  return sums_by_threads<T>(logits, targets_of(column, logits.size(1), {0, logits.size(1)}), threads);
}

// Calls run(dtype, T{}) for the dtypes that the kernels have.
template <class Run>
void each_dtype(const Run& run) {
  run(at::kFloat, float{});
  run(at::kDouble, double{});
  run(at::kHalf, at::Half{});
  run(at::kBFloat16, at::BFloat16{});
}

// Calls run(logits) with numbers of several widths and places in memory.
template <class Run>
void each_layout(at::ScalarType dtype, const Run& run) {
  for (const int64_t columns : {1, 3, 8, 31, 257, 5000}) {
    const at::Tensor values = at::arange(5 * columns, at::kDouble).mul(7.31).sin().mul(9).view({5, columns});
    for (const int64_t before : {0, 1, 5}) {
      for (const int64_t gap : {0, 3}) {
        CAPTURE(columns);
        CAPTURE(before);
        CAPTURE(gap);
        run(laid_out(values, dtype, before, gap));
      }
    }
  }
}

bool close(const at::Tensor& got, const at::Tensor& want, double tolerance) {
  return at::allclose(got.to(at::kDouble), want.to(at::kDouble), tolerance, tolerance, /*equal_nan=*/true);
}

double tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-13 : 1e-5; }

}  // namespace

TEST_CASE("the threads of a row find its greatest logit, the sum of its exponentials, and the logit of its column") {
  each_dtype([]<class T>(at::ScalarType dtype, T) {
    CAPTURE(c10::toString(dtype));
    each_layout(dtype, [&](const at::Tensor& logits) {
      const at::Tensor column = at::arange(5).mul(3).remainder(logits.size(1));
      const at::Tensor x = logits.to(computed(dtype));
      for (const int threads : {1, 7, 256}) {
        CAPTURE(threads);
        const RowSums got = sums_by_threads<T>(logits, column, threads);
        CHECK(got.greatest.equal(x.amax(1)));
        CHECK(got.picked.equal(x.gather(1, column.unsqueeze(1)).squeeze(1)));
        const at::Tensor exact = (x.to(at::kDouble) - x.amax(1, true).to(at::kDouble)).exp().sum(1);
        CHECK(close(got.exps, exact, tolerance(dtype)));
      }
    });
  });
}

TEST_CASE("sums of exponentials that are exact come out bit by bit") {
  each_dtype([]<class T>(at::ScalarType dtype, T) {
    for (const int threads : {1, 7, 256}) {
      const at::Tensor equal =
          sums_by_threads<T>(at::full({2, 700}, -3.5, dtype), at::zeros({2}, at::kLong), threads).exps;
      CHECK(equal.equal(at::full({2}, 700, computed(dtype))));
      at::Tensor few = at::full({1, 700}, -kInfinity, dtype);
      for (const int64_t c : {0, 17, 350, 699}) few[0][c].fill_(2);
      CHECK(sums_by_threads<T>(few, at::zeros({1}, at::kLong), threads).exps.equal(at::full({1}, 4, computed(dtype))));
    }
  });
}

TEST_CASE("rows of infinities, and rows with what is not a number") {
  const at::Tensor logits = at::zeros({5, 600});
  logits[0].fill_(-kInfinity);
  logits[4].fill_(std::nan(""));
  logits[1][300].fill_(kInfinity);
  logits[2][300].fill_(std::nan(""));
  logits[3][300].fill_(-kInfinity);
  for (const int threads : {1, 7, 256}) {
    const RowSums got = sums_by_threads<float>(logits, at::zeros({5}, at::kLong), threads);
    CHECK(close(got.greatest, at::tensor({-kInfinity, kInfinity, 0.0, 0.0, -kInfinity}), 0));
    CHECK(close(got.exps, at::tensor({0.0, std::nan(""), std::nan(""), 599.0, std::nan("")}), 0));
  }
}

TEST_CASE("the terms of all ranks add up to the sums over all classes, and these make the losses") {
  constexpr int64_t kIgnored = 3;  // it is a class too
  const at::Tensor logits = at::arange(7 * 40, at::kDouble).mul(3.7).sin().mul(30).view({7, 40});
  logits[4].slice(0, 0, 13).fill_(-kInfinity);  // all that the first rank has
  logits[5].fill_(-kInfinity);
  const at::Tensor target = at::tensor({0, 12, 13, 39, 20, 7, 3}, at::kLong);
  const at::Tensor of_all = logits.amax(1);
  const auto options = at::TensorOptions(at::kDouble);
  at::Tensor sums = at::zeros({15}, options);
  for (const auto& [begin, end] : {std::pair(0, 13), std::pair(13, 26), std::pair(26, 40), std::pair(40, 40)}) {
    const RowTargets targets = targets_of(target, 40, {begin, end}, kIgnored);
    const RowSums mine = sums_by_threads<double>(logits.slice(1, begin, end), targets, 7);
    const at::Tensor terms = at::full({15}, 5, options);
    const gpu::LogitTerms request = tessera::detail::terms_request(mine, of_all, targets, terms);
    for (int64_t row = 0; row < 7; ++row) gpu::store_terms<double>(request, row);
    sums += terms;
  }
  CHECK(sums[14].item<double>() == 40);
  const at::Tensor want = -logits.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1);
  want[6].fill_(0);
  const at::Tensor weight = at::arange(7, options).add(1);
  weight[6].fill_(0);
  for (const bool weighted : {false, true}) {
    const at::Tensor out = at::full({2, 7}, 5, options);
    const at::Tensor weights = weighted ? weight : weight.gt(0).to(at::kDouble);
    const gpu::LogitLosses request = tessera::detail::losses_request(sums, weighted ? weight : at::Tensor(),
                                                                     targets_of(target, 40, {0, 40}, kIgnored), out);
    for (int64_t row = 0; row < 7; ++row) gpu::store_loss<double>(request, row);
    CHECK(close(out[0], want * weights, 1e-13));
    CHECK(out[1].equal(weights));
  }
  CHECK(sums[5].isnan().item<bool>());
}

TEST_CASE("a class is one of all ranks' classes, or the ignored one") {
  const at::Tensor target = at::tensor({-1, 0, 5, 6, 9}, at::kLong);
  const at::Tensor none = at::empty({5, 0});
  const RowSums sums = empty_sums(none);
  const gpu::LogitSums request = tessera::detail::sums_request(none, targets_of(target, 6, {6, 6}, 9), sums);
  const std::vector<bool> valid = {false, true, true, false, true};
  for (int64_t row = 0; row < 5; ++row) {
    CHECK(gpu::is_valid(request.targets, row) == valid[static_cast<std::size_t>(row)]);
  }
}

// Returns the gradient of one row and column as a loop over all of them would compute it.
template <class T>
gpu::Computed<T> gradient_at(const at::Tensor& logits, const RowFactors& factors, const RowTargets& targets, int64_t i,
                             int64_t c) {
  using C = gpu::Computed<T>;
  const auto value = [](const at::Tensor& t, int64_t at) { return t.const_data_ptr<C>()[at]; };
  if (targets.of_row.const_data_ptr<int64_t>()[i] == targets.ignored) return 0;
  C of_row = value(factors.gradient, factors.gradient.numel() == 1 ? 0 : i);
  if (factors.total.defined()) of_row /= value(factors.total, 0);
  if (factors.weight.defined()) of_row *= value(factors.weight, i);
  const C x = static_cast<C>(logits.const_data_ptr<T>()[i * logits.stride(0) + c]);
  const C g = std::exp(x - value(factors.of_all, i)) * (of_row / value(factors.exps, i));
  return c + targets.mine.begin == targets.of_row.const_data_ptr<int64_t>()[i] ? g - of_row : g;
}

template <class T>
void check_gradient(const at::Tensor& logits, const RowFactors& factors, const RowTargets& targets) {
  const int64_t n = logits.size(0), k = logits.size(1);
  at::Tensor want = at::empty({n, k}, logits.scalar_type());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < k; ++c) {
      want.mutable_data_ptr<T>()[i * k + c] = static_cast<T>(gradient_at<T>(logits, factors, targets, i, c));
    }
  }
  for (const int64_t before : {0, 3}) {
    for (const int threads : {1, 7, 256}) {
      const at::Tensor memory = at::full({n * k + before}, 77, logits.scalar_type());
      const at::Tensor out = memory.slice(0, before).view({n, k});
      const gpu::LogitGradient request = tessera::detail::gradient_request(logits, factors, targets, out);
      for (int64_t row = 0; row < n; ++row) {
        for (int thread = 0; thread < threads; ++thread) gpu::gradient_of_row<T>(request, row, thread, threads);
      }
      CHECK(out.equal(want));
      CHECK(memory.slice(0, 0, before).eq(77).all().item<bool>());
    }
  }
}

TEST_CASE("the threads of a row write its gradient bit by bit as a loop does") {
  each_dtype([]<class T>(at::ScalarType dtype, T) {
    CAPTURE(c10::toString(dtype));
    each_layout(dtype, [&](const at::Tensor& logits) {
      const int64_t n = logits.size(0), k = logits.size(1);
      const auto options = at::TensorOptions(computed(dtype));
      // Where this rank has one column, most rows have a class of another rank.
      const RowTargets targets = targets_of(at::tensor({4, -1, 6, 4, 3}, at::kLong), 3 + k, {3, 3 + k}, -1);
      RowFactors factors{.of_all = logits.to(computed(dtype)).amax(1),
                         .exps = at::arange(n, options).add(1).mul(1.7),
                         .weight = {},
                         .gradient = at::full({1}, 0.7, options),
                         .total = {}};
      factors.of_all[1] = std::nan("");
      check_gradient<T>(logits, factors, targets);
      factors.weight = at::arange(n, options).mul(0.3);
      factors.gradient = at::arange(n, options).add(1).div(7);
      factors.total = at::full({}, 3, options);
      check_gradient<T>(logits, factors, targets);
    });
  });
}

TEST_CASE("logits of another layout, or on the host, are not for the kernels") {
  CHECK(has_adjacent_columns(at::ones({4, 6})));
  CHECK(has_adjacent_columns(at::ones({4, 12}).slice(1, 2, 8)));
  CHECK_FALSE(has_adjacent_columns(at::ones({6, 4}).t()));
  CHECK_FALSE(has_adjacent_columns(at::_efficientzerotensor({4, 6})));
  CHECK_FALSE(tessera::detail::takes_logits(at::ones({4, 6})));
}

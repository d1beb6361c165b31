#include "tessera/gpu_kernels/cross_entropy.h"

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/ops/kernels/logit_kernels.h"

using namespace tessera;
using tessera::detail::RowFactors;
using tessera::detail::RowSums;

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

template <class T>
RowSums sums_by_threads(const at::Tensor& logits, const at::Tensor& column, int threads) {
  RowSums out = empty_sums(logits);
  const std::optional<gpu::LogitSums> request = tessera::detail::sums_request(logits, column, out);
  REQUIRE(request);
  for (int64_t row = 0; row < request->rows; ++row) {
    std::vector<gpu::ExpSum<gpu::Computed<T>>> sums;
    for (int thread = 0; thread < threads; ++thread) sums.push_back(gpu::sum_of_row<T>(*request, row, thread, threads));
    gpu::store_sums<T>(*request, row, merged_in_block(sums));
  }
  return out;
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
  const at::Tensor logits = at::zeros({4, 600});
  logits[0].fill_(-kInfinity);
  logits[1][300].fill_(kInfinity);
  logits[2][300].fill_(std::nan(""));
  logits[3][300].fill_(-kInfinity);
  for (const int threads : {1, 7, 256}) {
    const RowSums got = sums_by_threads<float>(logits, at::zeros({4}, at::kLong), threads);
    CHECK(close(got.greatest, at::tensor({-kInfinity, kInfinity, std::nan(""), 0.0}), 0));
    CHECK(close(got.exps, at::tensor({0.0, std::nan(""), std::nan(""), 599.0}), 0));
  }
}

TEST_CASE("the terms of all ranks add up to the sums over all classes") {
  const at::Tensor logits = at::arange(6 * 40, at::kDouble).mul(3.7).sin().mul(30).view({6, 40});
  logits[4].slice(0, 0, 13).fill_(-kInfinity);  // all that the first rank has
  logits[5].fill_(-kInfinity);
  const at::Tensor target = at::tensor({0, 12, 13, 39, 20, 7}, at::kLong);
  const at::Tensor greatest = logits.amax(1);
  at::Tensor exps = at::zeros({6}, at::kDouble), picked = at::zeros({6}, at::kDouble);
  for (const auto& [begin, end] : {std::pair(0, 13), std::pair(13, 26), std::pair(26, 39), std::pair(39, 40)}) {
    const at::Tensor here = target.ge(begin).logical_and(target.lt(end));
    const at::Tensor column = (target - begin).masked_fill(here.logical_not(), 0);
    const RowSums sums = sums_by_threads<double>(logits.slice(1, begin, end), column, 7);
    const at::Tensor mine = at::full({6}, 5, at::kDouble), of_target = at::full({6}, 5, at::kDouble);
    tessera::detail::set_terms(sums, greatest, here, mine, of_target);
    exps += mine;
    picked += of_target;
  }
  CHECK(close(exps.log() - picked, -logits.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1), 1e-13));
  CHECK(exps[5].isnan().item<bool>());
}

TEST_CASE("the threads of a row write its gradient bit by bit as a loop does") {
  each_dtype([]<class T>(at::ScalarType dtype, T) {
    using C = gpu::Computed<T>;
    CAPTURE(c10::toString(dtype));
    each_layout(dtype, [&](const at::Tensor& logits) {
      const int64_t n = logits.size(0), k = logits.size(1);
      const auto options = at::TensorOptions(computed(dtype));
      RowFactors factors{.column = at::arange(n).mul(3).remainder(k),
                         .greatest = logits.to(computed(dtype)).amax(1),
                         .on_exps = at::arange(n, options).add(1).div(7),
                         .on_column = at::arange(n, options).mul(-0.3),
                         .kept = at::ones({n}, options)};
      factors.kept[1] = 0;
      factors.greatest[1] = std::nan("");
      at::Tensor want = at::empty({n, k}, dtype);
      const auto value = [](const at::Tensor& t, int64_t i) { return t.const_data_ptr<C>()[i]; };
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < k; ++c) {
          C g = std::exp(static_cast<C>(logits.const_data_ptr<T>()[i * logits.stride(0) + c]) -
                         value(factors.greatest, i)) *
                value(factors.on_exps, i);
          if (c == factors.column.const_data_ptr<int64_t>()[i]) g += value(factors.on_column, i);
          want.mutable_data_ptr<T>()[i * k + c] = static_cast<T>(i == 1 ? 0 : g);
        }
      }
      for (const int64_t before : {0, 3}) {
        for (const int threads : {1, 7, 256}) {
          const at::Tensor memory = at::full({n * k + before}, 77, dtype);
          const at::Tensor out = memory.slice(0, before).view({n, k});
          const std::optional<gpu::LogitGradient> request = tessera::detail::gradient_request(logits, factors, out);
          REQUIRE(request);
          for (int64_t row = 0; row < n; ++row) {
            for (int thread = 0; thread < threads; ++thread) {
              gpu::gradient_of_row<T>(*request, row, thread, threads);
            }
          }
          CHECK(out.equal(want));
          CHECK(memory.slice(0, 0, before).eq(77).all().item<bool>());
        }
      }
    });
  });
}

TEST_CASE("logits of another layout or dtype are not for the kernels") {
  const at::Tensor column = at::zeros({4}, at::kLong);
  const auto takes = [&](const at::Tensor& logits) {
    return tessera::detail::sums_request(logits, column, empty_sums(logits)).has_value();
  };
  CHECK(takes(at::ones({4, 6})));
  CHECK(takes(at::ones({4, 12}).slice(1, 2, 8)));
  CHECK_FALSE(takes(at::ones({6, 4}).t()));
  CHECK_FALSE(takes(at::ones({4, 0})));
  CHECK_FALSE(takes(at::_efficientzerotensor({4, 6})));
  // No GPU has these.
  CHECK_FALSE(tessera::detail::row_sums_on_gpu(at::ones({4, 6}), column));
}

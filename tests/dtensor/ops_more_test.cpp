// Tests less common operators, also ones that write their arguments; most have no rule, and are right.

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/placement/partition.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("operators that write into a clone", {1, 2, 3, 4}) {
  const at::Tensor a = sample({5, 3});
  const at::Tensor b = sample({5, 3}, 1);
  const at::Tensor rows = at::tensor({4, 0, 2}, on(at::kLong));
  check_ops({
      op_case("arithmetic", {a, b},
              [](const Tensors& x) { return x[0].clone().add_(x[1], 2).mul_(x[1]).sub_(0.5).div_(2); }),
      op_case("activations", {a}, [](const Tensors& x) { return x[0].clone().mul_(2).sigmoid_(); }),
      op_case("masked_fill_", {a, whole_numbers({5, 3}, at::kBool)},
              [](const Tensors& x) { return x[0].clone().masked_fill_(x[1], -2.0); }),
      op_case("copy_, broadcast", {a, sample({3}, 4)},
              [](const Tensors& x) { return x[0].clone().copy_(x[1]) * x[0]; }),
      op_case("index_put_", {a, rows, sample({3, 3}, 2)},
              [](const Tensors& x) { return x[0].clone().index_put_({x[1]}, x[2]); }),
      op_case("index_put_ that adds", {a, rows, sample({3, 3}, 2)},
              [](const Tensors& x) { return x[0].clone().index_put_({x[1]}, x[2], true); }),
      op_case("index_add_", {a, rows, sample({3, 3}, 2)},
              [](const Tensors& x) { return x[0].clone().index_add_(0, x[1], x[2]); }),
      op_case("scatter_add_", {a, whole_numbers({5, 3}, at::kLong), b},
              [](const Tensors& x) { return x[0].clone().scatter_add_(0, x[1], x[2]); }),
      op_case(
          "addmm_, addcmul_, lerp_", {a, b, sample({3, 3}, 2)},
          [](const Tensors& x) { return x[0].clone().addmm_(x[1], x[2]).addcmul_(x[1], x[1], 0.5).lerp_(x[1], 0.25); }),
      op_case("clamp_, abs_, neg_", {a}, [](const Tensors& x) { return x[0].clone().clamp_(-0.5, 0.5).neg_(); }),
      op_case("parts of a clone", {a, sample({2, 3}, 1)},
              [](const Tensors& x) {
                return at::slice_scatter(x[0], x[1], 0, 1, 3) + at::select_scatter(x[0], x[1].select(0, 0), 0, 2);
              }),
  });
}

TESSERA_RANKS_TEST_CASE("operators of convolution, of images, of sequences, of indices", {1, 2, 3, 4}) {
  const Placements batch = {R, S0, Shard(1)};
  const at::Tensor image = sample({3, 4, 5, 6});
  check_ops(
      {
          op_case("conv1d", {sample({3, 4, 7}), sample({2, 4, 3}, 1), sample({2}, 2)},
                  [](const Tensors& x) { return at::conv1d(x[0], x[1], x[2], 1, 1); }),
          op_case("conv2d", {image, sample({2, 4, 3, 3}, 1), sample({2}, 2)},
                  [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], 1, 1); }),
          op_case("pooling", {image},
                  [](const Tensors& x) {
                    return Tensors{at::max_pool2d(x[0], 2), at::avg_pool2d(x[0], 2)};
                  },
                  {batch}),
          op_case("batch_norm", {sample({6, 3}), sample({3}, 1), sample({3}, 2)},
                  [](const Tensors& x) { return at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false); }),
          op_case("cumulative", {sample({5, 3})},
                  [](const Tensors& x) {
                    return Tensors{x[0].cumsum(0), x[0].cumprod(1), x[0].cumsum(1)};
                  }),
          op_case("variances", {sample({5, 3})},
                  [](const Tensors& x) {
                    return Tensors{x[0].var(), x[0].std(0), x[0].var(1)};
                  }),
          op_case(
              "by conditions", {sample({5, 3})},
              [](const Tensors& x) {
                return Tensors{x[0].masked_select(x[0] > 0), (x[0] > 0).nonzero(), x[0].index({x[0].select(1, 0) > 0})};
              }),
          op_case("one_hot and bincount", {whole_numbers({5}, at::kLong)},
                  [](const Tensors& x) {
                    return Tensors{at::one_hot(x[0], 5), at::bincount(x[0])};
                  }),
          op_case("take_along_dim", {sample({5, 3}), at::tensor({1, 0, 2, 1, 0}, on(at::kLong))},
                  [](const Tensors& x) { return at::take_along_dim(x[0], x[1].unsqueeze(1), 1); }),
          op_case("cdist, norm of rows", {sample({5, 3}), sample({4, 3}, 1)},
                  [](const Tensors& x) {
                    return Tensors{at::cdist(x[0], x[1]), at::cosine_similarity(x[0].slice(0, 0, 4), x[1])};
                  }),
          op_case("linear algebra", {sample({3, 3}) + at::eye(3, on(at::kDouble)) * 3},
                  [](const Tensors& x) {
                    return Tensors{at::inverse(x[0]), at::linalg_det(x[0]), at::trace(x[0])};
                  }),
          op_case("normalize", {sample({5, 3})},
                  [](const Tensors& x) { return x[0] / x[0].norm(2, -1, true).clamp_min(1e-12); }),
          op_case("meshgrid, kron", {sample({5}), sample({3}, 1)},
                  [](const Tensors& x) {
                    return Tensors{at::kron(x[0], x[1]), at::meshgrid({x[0], x[1]}, "ij")[0] * 1};
                  }),
          op_case("interleave", {sample({5, 3})},
                  [](const Tensors& x) {
                    return Tensors{x[0].repeat_interleave(2, 0), x[0].expand({2, 5, 3}).sum(0)};
                  }),
          op_case("complex numbers", {sample({5, 3}), sample({5, 3}, 1)},
                  [](const Tensors& x) {
                    const at::Tensor z = at::complex(x[0], x[1]);
                    return Tensors{at::view_as_real(z * z), z.abs(), at::real(z.conj() * z)};
                  }),
      },
      8);
}

TESSERA_RANKS_TEST_CASE("single precision and half types keep their dtypes", {1, 2, 3}) {
  for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 1e-5}, {at::kBFloat16, 0.1}, {at::kHalf, 0.02}}) {
    const at::Tensor x3 = sample({3, 5, 4}, 0, dtype);
    std::vector<OpCase> cases = {
        op_case("linear", {x3, sample({7, 4}, 1, dtype), sample({7}, 2, dtype)},
                [](const Tensors& x) { return at::linear(x[0], x[1], x[2]); }),
        op_case("layer_norm", {x3, sample({4}, 1, dtype), sample({4}, 2, dtype)},
                [](const Tensors& x) { return at::layer_norm(x[0], {4}, x[1], x[2]); }),
        op_case("softmax, to float and back", {x3},
                [](const Tensors& x) {
                  return Tensors{at::softmax(x[0], -1), at::softmax(x[0], -1, at::kFloat).to(x[0].scalar_type())};
                }),
        op_case("attention",
                {sample({2, 2, 5, 4}, 0, dtype), sample({2, 2, 5, 4}, 1, dtype), sample({2, 2, 5, 4}, 2, dtype)},
                [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2]); }),
        op_case("reductions", {x3},
                [](const Tensors& x) {
                  // The mean and its gradient are numbers of which a factor would show.
                  return Tensors{x[0].sum(0), (x[0] + 2).mean() * 50, x[0].amax(1), x[0].norm()};
                }),
        op_case("arithmetic", {x3, sample({3, 5, 4}, 1)},
                [](const Tensors& x) { return x[0] * 2 + x[1].to(x[0].scalar_type()); }),
    };
    for (OpCase& c : cases) c.tolerance = tolerance;
    check_ops(cases, 8);
  }
}

TESSERA_RANKS_TEST_CASE("values that leave the tensors: item, equal, allclose, and what is written into a whole out",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor a = sample({5, 3});
  for (const Placement& placement : {R, S0, Shard(1), Partial()}) {
    CAPTURE(to_string(placement));
    const at::Tensor x = spread(a, mesh, {placement});
    CHECK(std::abs(x.sum().item<double>() - a.sum().item<double>()) < 1e-12);
    CHECK(std::abs(x.select(0, 4).select(0, 1).item<double>() - a[4][1].item<double>()) < 1e-12);
    CHECK(at::allclose(x, spread(a, mesh, {S0})));
    CHECK_FALSE(at::allclose(x, spread(a + 1, mesh, {S0})));
    CHECK(at::equal(x, x));
    CHECK(at::equal(spread(a, mesh, {S0}), spread(a, mesh, {S0})));
    at::Tensor changed = a.clone();
    changed[0][0] = 7;
    CHECK_FALSE(at::equal(spread(a, mesh, {S0}), spread(changed, mesh, {S0})));
    CHECK_FALSE(at::equal(spread(a, mesh, {S0}), spread(changed, mesh, {Shard(1)})));
    CHECK((x.abs().max() < 2).item<bool>());
    at::Tensor out = spread(at::zeros({5, 3}, on(at::kDouble)), mesh, {placement});
    at::eye_out(out, 5, 3);
    CHECK(placements_of(out) == Placements{placement});
    CHECK(same(full_tensor(out), at::eye(5, 3, on(at::kDouble))));
  }
}

TESSERA_RANKS_TEST_CASE("backward throws for a saved tensor that was written since, as for any tensor", {2}) {
  const DeviceMesh mesh = line();
  at::Tensor x = spread(sample({4, 3}), mesh, {S0});
  x.requires_grad_(true);
  const at::Tensor y = x * 1;
  const at::Tensor z = (y * y).sum();
  y.detach().add_(1);
  CHECK_THROWS_WITH(z.backward(), doctest::Contains("modified by an inplace operation"));
  CHECK_THROWS_WITH(x.add_(1),
                    doctest::Contains("a leaf Variable that requires grad is being used in an in-place operation"));
  // A detached tensor shares its values.
  x.detach().zero_();
  CHECK(full_tensor(x.detach()).abs().sum().item<double>() == 0);
}

TESSERA_RANKS_TEST_CASE("decisions and terms that look alike and are not", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 6});
  const at::Tensor terms = spread(x, mesh, {P});
  CHECK(close(full_tensor(at::constant_pad_nd(terms, {1, 1}, 0.0)), at::constant_pad_nd(x, {1, 1}, 0.0)));
  CHECK(close(full_tensor(at::constant_pad_nd(terms, {1, 1}, 5.0)), at::constant_pad_nd(x, {1, 1}, 5.0)));

  const at::Tensor below = at::full({3}, mesh.local_rank(0) == 0 ? -1.0 : 0.0, on(at::kDouble));
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    const at::Tensor pending = from_local(below, mesh, {Partial(op)});
    CHECK(same(full_tensor(pending.any()), full_tensor(pending).any()));
    CHECK(same(full_tensor(pending.all()), full_tensor(pending).all()));
  }

  const at::Tensor many = at::full({700, 300}, 300.0, on(at::kHalf));
  const at::Tensor pieces = spread(many, mesh, {S0});
  CHECK(close(full_tensor(pieces.mean()), many.mean(), 1e-2));
  CHECK(
      close(full_tensor(pieces.slice(1, 0, 1).slice(0, 0, 8).norm()), many.slice(1, 0, 1).slice(0, 0, 8).norm(), 1e-2));

  // Gradients of a mean over many elements, and sums of small powers, are smaller than float16 holds on the way; sums
  // of an average and variances are larger.
  const auto is_near = [](const at::Tensor& got, double want) {
    return close(full_tensor(got.detach()).flatten().slice(0, 0, 1).to(at::kDouble) / want,
                 at::ones({1}, on(at::kDouble)), 1e-2);
  };
  const at::Tensor far = at::full({3'000'000}, 100.0, on(at::kHalf)), zeros = at::zeros_like(far);
  const at::Tensor half = spread(far, mesh, {S0}).requires_grad_();
  at::mse_loss(half, spread(zeros, mesh, {S0})).backward();
  CHECK(is_near(half.grad(), 200.0 / 3e6));
  const at::Tensor small = at::full({1'000'000}, 1e-4, on(at::kFloat)).to(at::kHalf);
  CHECK(is_near(at::_foreach_powsum({spread(small, mesh, {S0})}, 2)[0], 0.01));
  const at::Tensor apart = at::arange(-4, 4, on(at::kFloat)).mul(300).to(at::kHalf).view({8, 1});
  const at::Tensor means = spread(at::zeros({1}, on(at::kHalf)), mesh, {R}),
                   variances = spread(at::ones({1}, on(at::kHalf)), mesh, {R});
  at::batch_norm(spread(apart, mesh, {S0}), {}, {}, means, variances, true, 0.1, 1e-5, false);
  CHECK(is_near(variances, 0.9 + 0.1 * 6 * 300 * 300));
  const at::Tensor great = at::full({2}, 40'000.0, on(at::kFloat)).to(at::kHalf);
  CHECK(same(all_reduce(great, mesh, 0, ReduceOp::kAvg), great));

  // Neither the sum of these losses nor, of 70,000, the number of them is a float16.
  for (const bool weighted : {false, true}) {
    for (const int64_t ignored : {-100, 1}) {
      const at::Tensor scores = at::full({70'000, 3}, -11.0, on(at::kHalf));
      const at::Tensor target = at::arange(70'000, on(at::kLong)).remainder(3);
      const std::optional<at::Tensor> weight =
          weighted ? std::make_optional(at::tensor({1.0, 0.5, 2.0}, on(at::kFloat)).to(at::kHalf)) : std::nullopt;
      const std::optional<at::Tensor> of_pieces =
          weighted ? std::make_optional(spread(*weight, mesh, {R})) : std::nullopt;
      const at::Tensor loss =
          at::nll_loss(spread(scores, mesh, {S0}), spread(target, mesh, {S0}), of_pieces, at::Reduction::Mean, ignored);
      CHECK(is_near(loss, 11.0));
    }
  }

  CHECK(same(full_tensor(at::sum(spread(x, mesh, {S0}), at::kBool)), at::sum(x, at::kBool)));
  CHECK(spread(at::zeros({0, 3}, on(at::kFloat)), mesh, {R}).unbind(0).empty());
  at::Tensor out = spread(at::zeros({6}, on(at::kDouble)), mesh, {P});
  at::mean_out(out, spread(x, mesh, {S0}), {0});
  CHECK(close(full_tensor(out), x.mean(0)));
}

TESSERA_RANKS_TEST_CASE("transposed tensors, whose order in memory LibTorch's kernels and formulas ask for",
                        {1, 2, 3, 4}) {
  // The matrix is well conditioned, so that the rounding of a sum's terms stays small.
  const at::Tensor a = sample({4, 4}) + 4 * at::eye(4, on(at::kDouble)), b = sample({4, 4}, 1);
  const at::Tensor batch = sample({8, 4, 4}, 2) + 4 * at::eye(4, on(at::kDouble));
  const std::vector<Placements> kinds = {{R, S0, Shard(1), Partial()}, {R, S0, Shard(1)}};
  check_ops({
      op_case("det", {a},
              [](const Tensors& x) {
                return Tensors{x[0].t().det(), x[0].det()};
              }),
      op_case("slogdet", {a}, [](const Tensors& x) { return std::get<1>(at::linalg_slogdet(x[0].t())); }),
      op_case("inverse", {a}, [](const Tensors& x) { return at::linalg_inv(x[0].t()); }),
      op_case("solve", {a, b}, [](const Tensors& x) { return at::linalg_solve(x[0].t(), x[1].t()); }),
      // LibTorch would take pieces of these for vectors.
      op_case("solve for one right-hand side in a batch", {b, batch},
              [](const Tensors& x) { return at::linalg_solve(x[1], x[0]); }, {{R, S0, Shard(1)}, {R, S0}}),
      op_case("solve for more columns than rows", {sample({4, 8}, 2), batch.narrow(0, 0, 4)},
              [](const Tensors& x) { return at::linalg_solve(x[1], x[0]); }, {{R, S0, Shard(1), Partial()}, {R, S0}}),
      op_case(
          "kron", {a, b}, [](const Tensors& x) { return at::kron(x[0].t(), x[1].t()); }, kinds),
      op_case(
          "sum, view", {a, b},
          [](const Tensors& x) {
            return (x[0].t() + x[1].t()).t().view({2, 8});
          },
          kinds),
      op_case("addmv, broadcast", {sample({1}), sample({3, 2}), sample({2}, 1)},
              [](const Tensors& x) { return at::addmv(x[0], x[1], x[2], 0.5, 2.0); }),
      op_case("addmv, of no matrix", {sample({1}), sample({3, 0}), sample({0}, 1)},
              [](const Tensors& x) { return at::addmv(x[0].expand({3}), x[1], x[2]); }),
      op_case("imag of a conjugate", {a, b},
              [](const Tensors& x) { return at::imag(at::complex(x[0], x[1]).conj()) * 2; }),
  });
}

TESSERA_RANKS_TEST_CASE("a pending product or maximum is not converted between real and complex", {2, 3}) {
  const DeviceMesh mesh = line();
  const auto n = static_cast<double>(mesh.size()), me = static_cast<double>(mesh.local_rank(0));
  const at::Tensor factor = at::full({4}, c10::complex<double>(0.5, 1.0 + me), on(at::kComplexDouble));
  const at::Tensor product = from_local(factor, mesh, {Partial(ReduceOp::kProduct)});
  CHECK(close(full_tensor(product.to(at::kDouble)), at::real(full_tensor(product))));
  CHECK(close(full_tensor(at::real(product)), at::real(full_tensor(product))));
  const at::Tensor largest = from_local(at::full({4}, me, on(at::kDouble)), mesh, {Partial(ReduceOp::kMax)});
  CHECK(close(full_tensor(largest.to(at::kComplexDouble)), at::full({4}, n - 1, on(at::kComplexDouble))));
}

TESSERA_RANKS_TEST_CASE(
    "the derivative of a pending sum's median is refused, since backward looks for it in another sum's rounding",
    {2, 3}) {
  const at::Tensor terms = spread(sample({5, 3}), line(), {Partial()}).requires_grad_(true);
  CHECK_THROWS_WITH_AS(terms.median(), doctest::Contains("aten::median: of Double [5, 3]"), std::invalid_argument);
  CHECK_NOTHROW(std::get<0>(terms.median(0)).sum().backward());
  const at::NoGradGuard no_grad;
  CHECK(close(full_tensor(terms.median()), sample({5, 3}).median()));
}

TESSERA_RANKS_TEST_CASE("narrow_copy of everything along a dimension that is cut", {2, 3, 4}) {
  const at::Tensor x = sample({5, 3});
  for (const Placement& placement : {R, S0, Shard(1), BlockCyclic(0, 1), P}) {
    CAPTURE(to_string(placement));
    for (int call = 0; call < 2; ++call) {
      const at::Tensor copy = at::narrow_copy(spread(x, line(), {placement}), 0, 0, 5);
      CHECK(close(full_tensor(copy), x));
      CHECK(placements_of(copy)[0].is_replicate() == placement.is_replicate());
    }
  }
}

TESSERA_RANKS_TEST_CASE("results of an expanded tensor are dense, as LibTorch's are", {1, 2, 3}) {
  const at::Tensor x = sample({8});
  for (const Placement& placement : {R, S0}) {
    CAPTURE(to_string(placement));
    for (const auto& f : {+[](const at::Tensor& t) {
                            return t.expand({4, 8}).relu();
                          },
                          +[](const at::Tensor& t) {
                            return at::hardtanh(t.expand({4, 8}));
                          },
                          +[](const at::Tensor& t) {
                            return at::where(t.expand({4, 8}) > 0, t, t * 2);
                          }}) {
      at::Tensor y = f(spread(x, line(), {placement}));
      CHECK_NOTHROW(y.add_(1));
      CHECK(close(full_tensor(y.view({32})), (f(x) + 1).view({32})));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a cached decision does not skip the operator's own checks", {2, 3}) {
  const at::Tensor x = spread(at::arange(1, 3, on(at::kLong)), line(), {S0});
  CHECK(same(full_tensor(x.pow(2)), at::arange(1, 3, on(at::kLong)).pow(2)));
  CHECK_THROWS_WITH(x.pow(-1), doctest::Contains("Integers to negative integer powers are not allowed"));
  const at::Tensor none = spread(at::empty({0, 3}, on(at::kDouble)), line(), {S0});
  CHECK_THROWS_WITH_AS(none.max(), doctest::Contains("Expected reduction dim to be specified for input.numel() == 0"),
                       c10::Error);
  CHECK(same(full_tensor(x.sum()), at::arange(1, 3, on(at::kLong)).sum()));
  const at::Tensor nan = spread(at::full({3}, std::nan(""), on(at::kDouble)), line(), {S0});
  CHECK_FALSE(at::equal(nan, nan));
}

TESSERA_RANKS_TEST_CASE("equal asks for a bool as item does: under Strict too, unless something would be redistributed",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor a = sample({5, 3}), numbers = at::arange(7, on(at::kLong));
  const at::Tensor x = spread(a, mesh, {S0}), whole = spread(numbers, mesh, {S0});
  const CommCounter counter(mesh);
  const Strict strict;
  CHECK(at::equal(whole, whole));
  CHECK(counter.total() == 0);
  CHECK(at::equal(x, x));
  CHECK(at::equal(x, spread(a, mesh, {S0})));
  CHECK_FALSE(at::equal(x, spread(a + 1, mesh, {S0})));
  CHECK(counter.total() == (mesh.size() == 1 ? 0 : 3));
  CHECK(counter.total() == counter.count("all_reduce"));
  if (mesh.size() == 1) return;
  CHECK_THROWS_WITH(at::equal(x, spread(a, mesh, {Shard(1)})), doctest::Contains("Strict forbids"));
  CHECK_THROWS_WITH(at::equal(spread(a, mesh, {Partial()}), x), doctest::Contains("Strict forbids"));
}

TESSERA_RANKS_TEST_CASE("attention: causal with its own mask, and heads that some ranks have none of", {1, 2, 3, 4}) {
  const at::Tensor q = sample({2, 2, 5, 4}), k = sample({2, 2, 5, 4}, 1), v = sample({2, 2, 5, 4}, 2);
  const auto transposed = [](const at::Tensor& t) { return t.transpose(2, 3).contiguous().transpose(2, 3); };
  check_ops(
      {
          op_case("causal, of a query that is not dense", {q, k, v},
                  [&](const Tensors& x) {
                    return at::scaled_dot_product_attention(transposed(x[0]), x[1], x[2], {}, 0.0, true);
                  }),
          op_case("one head", {sample({2, 1, 4, 3}), sample({2, 1, 3, 3}, 1), sample({2, 1, 3, 3}, 2)},
                  [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2]); },
                  {{S0, Shard(1), Shard(2)}, {R, Shard(1)}, {R, Shard(1)}}),
      },
      16);
}

TESSERA_RANKS_TEST_CASE("causal attention takes no plain key for a replicated one", {2}) {
  const at::Tensor q = distribute_tensor(sample({2, 5, 4}), line(), {R}), plain = sample({2, 5, 4}, 1);
  CHECK_THROWS_WITH_AS(at::scaled_dot_product_attention(q, plain, plain, {}, 0.0, true),
                       doctest::Contains("a plain tensor [2, "), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("channels-last stays so", {1, 2, 3}) {
  const at::Tensor x = sample({4, 3, 5, 6}).contiguous(at::MemoryFormat::ChannelsLast);
  for (const Placement& placement : {R, S0, Shard(1), Shard(2)}) {
    CAPTURE(to_string(placement));
    const at::Tensor d = spread(sample({4, 3, 5, 6}), line(), {placement}).contiguous(at::MemoryFormat::ChannelsLast);
    for (const auto& f :
         {+[](const at::Tensor& t) { return t.relu(); }, +[](const at::Tensor& t) { return at::hardtanh(t); },
          +[](const at::Tensor& t) { return t.sin(); },
          +[](const at::Tensor& t) { return at::where(t > 0, t, t * 2); }}) {
      CHECK(f(d).strides() == f(x).strides());
      CHECK(close(full_tensor(f(d)), f(x)));
    }
  }
}

TESSERA_RANKS_TEST_CASE("products of complex tensors have gradients of conjugated factors", {1, 2}) {
  const std::vector<Placements> kinds = {{R, S0}, {R, S0}};
  check_ops({
      op_case(
          "dense", {sample({2, 3, 4}), sample({4, 4}, 1)},
          [](const Tensors& x) {
            const at::Tensor y = at::matmul(at::complex(x[0], x[0] * 2), at::complex(x[1], -x[1]));
            return at::real(y * y);
          },
          kinds),
      op_case(
          "batched_matmul", {sample({2, 3, 4, 4}), sample({2, 3, 4, 4}, 1)},
          [](const Tensors& x) {
            const at::Tensor y = at::matmul(at::complex(x[0], x[0] * 2), at::complex(x[1], -x[1]));
            return at::real(y * y);
          },
          kinds),
  });
}

namespace {

// Cuts as torch.chunk does, but only sizes that the ranks divide.
class EvenOnly final : public Partition {
 public:
  EvenOnly() : Partition("EvenOnly", "") {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    if (size % parts != 0) throw std::invalid_argument(fmt::format("EvenOnly: {} does not divide {}", parts, size));
    return one_interval(size / parts * index, size / parts * (index + 1));
  }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("where a partition does not cut a result, an operator takes another layout", {2, 4}) {
  const DeviceMesh mesh = line();
  const Placement even = Shard(0, std::make_shared<const EvenOnly>());
  const at::Tensor a = sample({12, 4}), x = spread(a, mesh, {even});
  CHECK(placements_of(x.neg()) == Placements{even});
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{3, 4, 4}, {6, 2, 4}, {1, 48}, {48}, {3, 16}}) {
    CAPTURE(sizes.size());
    CHECK(same(full_tensor(x.view(sizes)), a.view(sizes)));
    CHECK(same(full_tensor(x.reshape(sizes) * 2), a.view(sizes) * 2));
  }
  CHECK(close(full_tensor(at::avg_pool1d(x.t().unsqueeze(0), 4)), at::avg_pool1d(a.t().unsqueeze(0), 4)));
}

TESSERA_RANKS_TEST_CASE("a partition of a fixed number of parts beside a mesh dimension of one rank", {4}) {
  const Placement ragged = RaggedShard(0, {1, 2, 3, 2});
  const at::Tensor a = sample({8, 12}), b = sample({8, 12}, 1);
  for (const bool first : {false, true}) {
    const DeviceMesh mesh(line().world_ptr(), line().device_type(),
                          first ? Mesh({1, 4}, {"a", "b"}) : Mesh({4, 1}, {"a", "b"}));
    const at::Tensor x = spread(a, mesh, {ragged, ragged});
    for (const Placements& other : {Placements{R, S0}, {S0, R}, {S0, S0}, {S1, R}, {R, R}, {ragged, ragged}}) {
      CAPTURE(to_string(other));
      const at::Tensor y = spread(b, mesh, other);
      CHECK(close(full_tensor(at::mm(x, y.t())), at::mm(a, b.t())));
      CHECK(close(full_tensor(at::mm(y, x.t())), at::mm(b, a.t())));
      CHECK(close(full_tensor(x * y), a * b));
      CHECK(close(full_tensor(y.add(x)), b + a));
    }
    CHECK(placements_of(x.neg()) == Placements{ragged, ragged});
    const at::Tensor written = spread(a, mesh, {ragged, ragged});
    written.mul_(2);
    CHECK(same(full_tensor(written), a * 2));
  }
}

TESSERA_RANKS_TEST_CASE("results of an expanded tensor that moves have the memory order that their strides say",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor c = sample({2, 6, 3}), g = sample({});
  for (const Placement& p : {Placement(Shard(1)), BlockCyclic(1, 1), R, RaggedShard(1, {1, 5})}) {
    if (p == RaggedShard(1, {1, 5}) && mesh.size() != 2) continue;
    for (const Placement& of_scalar : {R, P}) {
      CAPTURE(to_string(Placements{p, of_scalar}));
      const at::Tensor x = spread(c, mesh, {p}).transpose(1, 2);
      const at::Tensor y = spread(g, mesh, {of_scalar}).expand({2, 3, 6});
      for (const at::Tensor& z : {y * x, x * y}) {
        CHECK(close(full_tensor(z.transpose(1, 2).view({12, 3})), (c * g).view({12, 3})));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("backward of a tensor that was cut in two halves", {2}) {
  const auto run = [](const at::Tensor& x) {
    const at::Tensor y = (x * 1.0).view({8, 3}).tanh().view({2, 4, 3});
    at::cat({y, y.tanh()}, 1).transpose(1, 2).sin().sum().backward();
    return x.grad();
  };
  CHECK(close(full_tensor(run(leaf(sample({2, 4, 3}), line(), {Shard(1)}))), run(leaf(sample({2, 4, 3})))));
}

TESSERA_RANKS_TEST_CASE("Strict lets an in-place operator pass that computes in a copy and communicates nothing",
                        {1, 2}) {
  const DeviceMesh mesh(line().world_ptr(), line().device_type(), Mesh({1, line().size()}, {"dp", "tp"}));
  const at::Tensor a = sample({4, 3});
  const Strict strict;
  const at::Tensor x = spread(a, mesh, {S0, R});
  const CommCounter counter(mesh);
  x.cumsum_(0);
  CHECK(counter.total() == 0);
  CHECK(close(full_tensor(x), a.cumsum(0)));
  const at::Tensor row = at::tensor({1}, on(at::kLong));
  x.index_fill_(0, spread(row, mesh, {R, R}), 3);
  CHECK(close(full_tensor(x), a.cumsum(0).index_fill(0, row, 3)));
}

// Tests the operators that the layers and losses of a transformer use, on DTensors of many layouts against plain
// tensors.

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor ids(at::IntArrayRef shape, int64_t below) {
  return (at::arange(c10::multiply_integers(shape), on(at::kLong)) * 5 + 2).remainder(below).view(shape);
}

at::Tensor attention(const Tensors& x, const std::optional<at::Tensor>& mask, bool causal) {
  return at::scaled_dot_product_attention(x[0], x[1], x[2], mask, 0.0, causal);
}

// Returns the loss per element, and both reductions.
template <class Loss>
Tensors three_reductions(const Loss& loss) {
  return {loss(at::Reduction::None), loss(at::Reduction::Mean), loss(at::Reduction::Sum)};
}

// A small model of images, which writes its activations in place; the results after each of its layers.
Tensors small_convolutional(const at::Tensor& images, const Tensors& p) {
  Tensors out = {at::conv2d(images, p[0], p[1], 1, 1)};
  out.push_back(at::conv2d(at::relu_(out[0]), p[2], p[3], 1, 1));
  out.push_back(at::max_pool2d(at::relu_(out[1]), 2));
  out.push_back(at::linear(out[2].flatten(1), p[4], p[5]));
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("convolutions with cut parameters move kernels and pieces of images: none is reduced",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor images = sample({5, 3, 24, 24});
  Tensors plain, cut;
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{10, 3, 3, 3}, {10}, {9, 10, 3, 3}, {9}, {7, 1296}, {7}}) {
    plain.push_back(leaf(sample(sizes, static_cast<int64_t>(plain.size()))));
    cut.push_back(leaf(spread(plain.back(), mesh, {Shard(0)})));
  }
  const at::Tensor logits = small_convolutional(images, plain).back();
  at::cross_entropy_loss(logits, ids({5}, 7)).backward();
  const int64_t largest = 5 * 10 * 24 * 24 * 8;  // bytes of what the first convolution gives
  const ImplicitReplication guard;
  for (const Placement& layout : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(2))}) {
    CAPTURE(to_string(layout));
    CommCounter counter(mesh);
    const Tensors layers = small_convolutional(spread(images, mesh, {layout}), cut);
    CHECK(counter.count("reduce_scatter") + counter.count("all_reduce") == 0);
    CHECK(counter.total_bytes() < largest);
    CHECK(close(full_tensor(layers.back().detach()), logits.detach()));
    counter.reset();
    at::cross_entropy_loss(layers.back(), ids({5}, 7)).backward();
    CHECK(counter.count_by_op("aten::threshold_backward") == 0);
    CHECK(counter.total_bytes() < 2 * largest);
    for (std::size_t k = 0; k < cut.size(); ++k) {
      CHECK(close(full_tensor(cut[k].grad()), plain[k].grad(), 1e-11));
      cut[k].mutable_grad().reset();
    }
  }
}

TESSERA_RANKS_TEST_CASE("norms and softmax", {1, 2, 3, 4}) {
  const at::Tensor x3 = sample({3, 5, 4});
  check_ops({
      op_case("layer_norm", {x3, sample({4}, 1), sample({4}, 2)},
              [](const Tensors& x) { return at::layer_norm(x[0], {4}, x[1], x[2]); }),
      op_case("layer_norm of two dimensions", {x3, sample({5, 4}, 1), sample({5, 4}, 2)},
              [](const Tensors& x) {
                return at::layer_norm(x[0], {5, 4}, x[1], x[2]);
              }),
      op_case("layer_norm without weights", {x3}, [](const Tensors& x) { return at::layer_norm(x[0], {4}); }),
      op_case("layer_norm of no rows", {sample({0, 4}), sample({4}, 1)},
              [](const Tensors& x) { return at::layer_norm(x[0], {4}, x[1]); }),
      op_case("rms_norm", {x3, sample({4}, 1)}, [](const Tensors& x) { return at::rms_norm(x[0], {4}, x[1], 1e-6); }),
      op_case("rms_norm by hand", {x3, sample({4}, 1)},
              [](const Tensors& x) { return x[0] * at::rsqrt(x[0].pow(2).mean(-1, true) + 1e-6) * x[1]; }),
      op_case("group_norm", {sample({3, 4, 5}), sample({4}, 1), sample({4}, 2)},
              [](const Tensors& x) { return at::group_norm(x[0], 2, x[1], x[2]); }),
      op_case("softmax, last", {x3}, [](const Tensors& x) { return at::softmax(x[0], -1); }),
      op_case("softmax, first", {x3}, [](const Tensors& x) { return at::softmax(x[0], 0); }),
      op_case("log_softmax", {x3}, [](const Tensors& x) { return at::log_softmax(x[0], 1); }),
      op_case("logsumexp", {x3}, [](const Tensors& x) { return at::logsumexp(x[0], {1}); }),
      op_case("glu", {sample({3, 6})}, [](const Tensors& x) { return at::glu(x[0], -1); }),
  });
}

TESSERA_RANKS_TEST_CASE("batch norm has the statistics of the whole batch", {1, 2, 3, 4}) {
  const auto trained = [](const Tensors& x) {
    return at::batch_norm(x[0], x.size() > 1 ? x[1] : at::Tensor(), x.size() > 1 ? x[2] : at::Tensor(), {}, {}, true,
                          0.1, 1e-5, false);
  };
  check_ops({
      op_case("batch_norm", {sample({3, 4, 5}), sample({4}, 1), sample({4}, 2)}, trained),
      op_case("batch_norm without weights", {sample({6, 4})}, trained),
      op_case("instance_norm", {sample({3, 4, 5}), sample({4}, 1), sample({4}, 2)},
              [](const Tensors& x) { return at::instance_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false); }),
      op_case("batch_norm of known statistics", {sample({3, 4, 5}), sample({4}, 1), sample({4}, 2)},
              [](const Tensors& x) {
                const at::Tensor mean = x[1].detach();
                return at::batch_norm(x[0], x[1], x[2], mean, mean.abs() + 1, false, 0.1, 1e-5, false);
              }),
  });
}

TESSERA_RANKS_TEST_CASE("a batch norm in training updates its running statistics as one process does, in any layout",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({5, 4, 3});
  at::Tensor mean = sample({4}, 1);
  at::Tensor variance = sample({4}, 2).abs() + 1;
  const Tensors before = {mean.clone(), variance.clone()};
  for (int step = 0; step < 2; ++step) at::batch_norm(x, {}, {}, mean, variance, true, 0.3, 1e-5, false);
  for (const Placement& lies : {Replicate(), Shard(0)}) {
    for (const Placement& cut : {Shard(0), Shard(1), Shard(2)}) {
      const at::Tensor spread_mean = distribute_tensor(before[0].clone(), mesh, {lies}, kNoSource);
      const at::Tensor spread_variance = distribute_tensor(before[1].clone(), mesh, {lies}, kNoSource);
      const at::Tensor piece = distribute_tensor(x, mesh, {cut}, kNoSource);
      for (int step = 0; step < 2; ++step) {
        at::batch_norm(piece, {}, {}, spread_mean, spread_variance, true, 0.3, 1e-5, false);
      }
      CHECK(placements_of(spread_mean) == Placements{lies});
      CHECK(at::allclose(full_tensor(spread_mean), mean));
      CHECK(at::allclose(full_tensor(spread_variance), variance));
    }
  }
}

TESSERA_RANKS_TEST_CASE("embedding, by rows and by columns", {1, 2, 3, 4}) {
  check_ops(
      {
          op_case("embedding", {sample({11, 5}), ids({3, 4}, 11)},
                  [](const Tensors& x) { return at::embedding(x[0], x[1]); }),
          op_case("embedding of bool", {sample({11, 5}).gt(0), ids({3, 4}, 11)},
                  [](const Tensors& x) { return at::embedding(x[0], x[1]); }),
          op_case("embedding with padding", {sample({11, 5}), ids({3, 4}, 11)},
                  [](const Tensors& x) { return at::embedding(x[0], x[1], 2); }),
          op_case("embedding scaled by frequency", {sample({7, 4}), ids({9}, 7)},
                  [](const Tensors& x) { return at::embedding(x[0], x[1], -1, true); }),
          op_case("embedding of few rows", {sample({2, 5}), ids({3}, 2)},
                  [](const Tensors& x) { return at::embedding(x[0], x[1]); }),
          op_case("embedding of no ids", {sample({6, 5}), ids({0}, 6)},
                  [](const Tensors& x) { return at::embedding(x[0], x[1]); }),
          op_case("embedding tied with a product", {sample({11, 5}), ids({3, 4}, 11)},
                  [](const Tensors& x) { return at::matmul(at::embedding(x[0], x[1]), x[0].t()); }),
      },
      16);
}

TESSERA_RANKS_TEST_CASE("attention, with and without masks", {1, 2, 3, 4}) {
  const Tensors qkv = {sample({3, 4, 5, 2}), sample({3, 4, 6, 2}, 1), sample({3, 4, 6, 2}, 2)};
  Tensors masked = qkv;
  masked.push_back(sample({3, 1, 5, 6}, 3));
  Tensors allowed = qkv;
  allowed.push_back(whole_numbers({5, 6}, at::kBool, 1).logical_or(at::eye(5, 6, on(at::kFloat)).to(at::kBool)));
  const Tensors square = {sample({3, 4, 5, 2}), sample({3, 4, 5, 2}, 1), sample({3, 4, 5, 2}, 2)};
  const Placements some = {Replicate(), Shard(0), Shard(1)};
  check_ops({
      op_case("attention", qkv, [](const Tensors& x) { return attention(x, std::nullopt, false); }),
      op_case("attention, laid out as is usual", qkv,
              [](const Tensors& x) { return attention(x, std::nullopt, false); }, {some, some, some}),
      op_case("causal attention", square, [](const Tensors& x) { return attention(x, std::nullopt, true); }),
      op_case("attention with a mask to add", masked, [](const Tensors& x) { return attention(x, x[3], false); }),
      op_case("attention with a mask of bool", allowed, [](const Tensors& x) { return attention(x, x[3], false); }),
      op_case("attention by hand", square,
              [](const Tensors& x) {
                const at::Tensor scores = at::matmul(x[0], x[1].transpose(-2, -1)) / 1.4;
                return at::matmul(at::softmax(scores, -1), x[2]);
              }),
  });
}

TESSERA_RANKS_TEST_CASE("losses", {1, 2, 3, 4}) {
  at::Tensor target = ids({5}, 4);
  target[1] = -100;
  at::Tensor weight = sample({4}, 3).abs() + 0.1;
  const Placements whole = {Replicate()};
  check_ops({
      op_case("cross entropy", {sample({5, 4}), ids({5}, 4)},
              [](const Tensors& x) {
                return three_reductions([&](int64_t r) { return at::cross_entropy_loss(x[0], x[1], {}, r); });
              }),
      op_case("cross entropy, some ignored", {sample({5, 4}), target},
              [](const Tensors& x) {
                return three_reductions([&](int64_t r) { return at::cross_entropy_loss(x[0], x[1], {}, r); });
              }),
      op_case("cross entropy, weighted, some ignored", {sample({5, 4}), target, weight},
              [](const Tensors& x) {
                const at::Tensor w = x[2].detach();
                return three_reductions([&](int64_t r) { return at::cross_entropy_loss(x[0], x[1], w, r); });
              }),
      op_case("cross entropy of probabilities, smoothed", {sample({5, 4}), sample({5, 4}, 1).softmax(-1)},
              [](const Tensors& x) {
                return at::cross_entropy_loss(x[0], x[1].detach(), {}, at::Reduction::Mean, -100, 0.1);
              }),
      op_case("cross entropy of classes, smoothed", {sample({5, 4}), target},
              [](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, at::Reduction::Mean, -100, 0.1); }),
      op_case("cross entropy with places", {sample({3, 4, 5}), ids({3, 5}, 4)},
              [](const Tensors& x) {
                return three_reductions([&](int64_t r) { return at::cross_entropy_loss(x[0], x[1], {}, r); });
              }),
      op_case(
          "mse", {sample({6, 5}), sample({6, 5}, 1)},
          [](const Tensors& x) { return three_reductions([&](int64_t r) { return at::mse_loss(x[0], x[1], r); }); }),
      op_case(
          "mse of fewer rows than ranks", {sample({2, 3}), sample({2, 3}, 1)},
          [](const Tensors& x) { return three_reductions([&](int64_t r) { return at::mse_loss(x[0], x[1], r); }); }),
      op_case("l1", {sample({5, 3}), sample({5, 3}, 1)},
              [](const Tensors& x) { return three_reductions([&](int64_t r) { return at::l1_loss(x[0], x[1], r); }); }),
      op_case("smooth l1 and huber", {sample({5, 3}), sample({5, 3}, 1)},
              [](const Tensors& x) {
                return three_reductions(
                    [&](int64_t r) { return at::smooth_l1_loss(x[0], x[1], r) + at::huber_loss(x[0], x[1], r, 0.3); });
              }),
      op_case("binary cross entropy with logits", {sample({5, 3}), sample({5, 3}, 1).sigmoid()},
              [](const Tensors& x) {
                return three_reductions(
                    [&](int64_t r) { return at::binary_cross_entropy_with_logits(x[0], x[1].detach(), {}, {}, r); });
              }),
      op_case("kl_div", {sample({5, 3}).log_softmax(-1), sample({5, 3}, 1).softmax(-1)},
              [](const Tensors& x) {
                return three_reductions([&](int64_t r) { return at::kl_div(x[0], x[1].detach(), r); });
              }),
      op_case("nll of spatial pieces", {sample({3, 4, 2, 2}), ids({3, 2, 2}, 4)},
              [](const Tensors& x) {
                return three_reductions([&](int64_t r) { return at::nll_loss2d(x[0].log_softmax(1), x[1], {}, r); });
              }),
  });
}

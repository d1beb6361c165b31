// Tests operators whose LibTorch kernels read a tensor argument on the host, or write a statistic that their schemas do
// not declare, with DTensors for these arguments, against plain tensors.

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/jit.h>
#include <torch/nn.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns log_probs (5, 6, 4), targets (6, 2), and the lengths of inputs and of targets.
struct Ctc {
  at::Tensor log_probs = at::log_softmax(sample({5, 6, 4}) * 2, 2);
  at::Tensor targets = whole_numbers({6, 2}, at::kLong) % 3 + 1;
  at::Tensor input_lengths = at::tensor({5, 5, 4, 5, 3, 5}, at::kLong);
  at::Tensor target_lengths = at::tensor({2, 1, 2, 2, 0, 2}, at::kLong);
};

using Loss = std::function<at::Tensor(const Ctc&)>;

std::vector<int64_t> numbers(const at::Tensor& t) {
  return {t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel()};
}

Loss scripted(const std::string& body) {
  const auto unit = torch::jit::compile(body);
  return [unit](const Ctc& c) {
    return unit->run_method("f", c.log_probs, c.targets, c.input_lengths, c.target_lengths).toTensor();
  };
}

std::vector<Loss> losses() {
  const std::vector<int64_t> inputs = numbers(Ctc().input_lengths), targets = numbers(Ctc().target_lengths);
  std::vector<Loss> out;
  for (const int64_t reduction : {0, 1, 2}) {
    out.emplace_back([=](const Ctc& c) {
      return at::ctc_loss(c.log_probs, c.targets, c.input_lengths, c.target_lengths, 0, reduction, true);
    });
    out.emplace_back(
        [=](const Ctc& c) { return at::ctc_loss(c.log_probs, c.targets, inputs, targets, 0, reduction, true); });
  }
  out.emplace_back(
      [](const Ctc& c) { return torch::nn::CTCLoss()(c.log_probs, c.targets, c.input_lengths, c.target_lengths); });
  out.push_back(scripted(R"(
def f(log_probs, targets, input_lengths, target_lengths):
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, 0, 1, False)
)"));
  out.push_back(scripted(R"(
def f(log_probs, targets, input_lengths, target_lengths):
    return torch.ctc_loss(log_probs, targets, [5, 5, 4, 5, 3, 5], [2, 1, 2, 2, 0, 2], 0, 2, False)
)"));
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("ctc_loss takes lengths as DTensors, as plain tensors and as lists", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const Ctc plain;
  for (const Loss& loss : losses()) {
    Ctc whole = plain;
    whole.log_probs = plain.log_probs.detach().clone().requires_grad_();
    const at::Tensor want = loss(whole);
    (want * want).sum().backward();
    for (const Placement& placement : {R, S0, Shard(1), Shard(2), Partial()}) {
      for (const Placement& lengths : {R, S0}) {
        CAPTURE(to_string(placement));
        CAPTURE(to_string(lengths));
        Ctc d;
        d.log_probs = spread(plain.log_probs, mesh, {placement}).requires_grad_();
        d.targets = spread(plain.targets, mesh, {lengths});
        d.input_lengths = spread(plain.input_lengths, mesh, {lengths});
        d.target_lengths = spread(plain.target_lengths, mesh, {lengths});
        const at::Tensor got = loss(d);
        CHECK(close(full_tensor(got.detach()), want.detach()));
        (got * got).sum().backward();
        CHECK(close(full_tensor(d.log_probs.grad()), whole.log_probs.grad()));
      }
      Ctc beside = plain;
      beside.log_probs = spread(plain.log_probs, mesh, {placement});
      beside.targets = spread(plain.targets, mesh, {R});
      CHECK(close(full_tensor(loss(beside)), want.detach()));
      const at::InferenceMode inference;
      CHECK(close(full_tensor(loss(beside)), want.detach()));
    }
  }
}

TESSERA_RANKS_TEST_CASE("ctc_loss takes one sequence without a dimension for the batch", {1, 2, 3, 4}) {
  const at::Tensor log_probs = sample({5, 4}).log_softmax(-1), targets = at::tensor({1, 3});
  for (const int64_t reduction : {0, 1, 2}) {
    const at::Tensor leaf = log_probs.clone().requires_grad_();
    const at::Tensor want = at::ctc_loss(leaf, targets, {5}, {2}, 0, reduction);
    (want * want).sum().backward();
    for (const Placement& placement : {R, S0, Shard(1), Partial()}) {
      CAPTURE(reduction);
      CAPTURE(to_string(placement));
      const at::Tensor d = spread(log_probs, line(), {placement}).requires_grad_();
      const at::Tensor got = at::ctc_loss(d, spread(targets, line(), {R}), {5}, {2}, 0, reduction);
      CHECK(got.sizes() == want.sizes());
      CHECK(close(full_tensor(got.detach()), want.detach()));
      (got * got).sum().backward();
      CHECK(close(full_tensor(d.grad()), leaf.grad()));
    }
  }
}

TESSERA_RANKS_TEST_CASE("ctc_loss refuses lengths that are no whole numbers, and plain targets among DTensors", {2}) {
  const Ctc c;
  const at::Tensor d = spread(c.log_probs, line(), {R});
  CHECK_THROWS_WITH_AS(
      at::ctc_loss(d, spread(c.targets, line(), {R}), c.input_lengths.to(at::kDouble), c.target_lengths),
      doctest::Contains("input_lengths are of Double"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(at::ctc_loss(d, c.targets, c.input_lengths, c.target_lengths),
                       doctest::Contains("a plain tensor [6, 2] among DTensors"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("_batch_norm_with_update updates statistics in any layout, and has gradients", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({5, 4, 3}), weight = sample({4}, 3), bias = sample({4}, 4), seed = sample({5, 4, 3}, 5);
  const auto run = [&](at::Tensor input, const at::Tensor& w, const at::Tensor& b, at::Tensor mean, at::Tensor variance,
                       const at::Tensor& grad, bool training) {
    const auto out = training ? at::_batch_norm_with_update(input, w, b, mean, variance, 0.3, 1e-5)
                              : at::_batch_norm_no_update(input, w, b, mean, variance, 0.3, 1e-5);
    std::get<0>(out).mul(grad).sum().backward();
    return std::get<0>(out).detach();
  };
  for (const bool training : {true, false}) {
    const at::Tensor px = x.clone().requires_grad_(), pw = weight.clone().requires_grad_(),
                     pb = bias.clone().requires_grad_();
    at::Tensor mean = sample({4}, 1), variance = sample({4}, 2).abs() + 1;
    const at::Tensor want = run(px, pw, pb, mean, variance, seed, training);
    for (const Placement& lies : {R, S0}) {
      for (const Placement& cut : {R, S0, Shard(1), Shard(2)}) {
        CAPTURE(to_string(lies));
        CAPTURE(to_string(cut));
        const at::Tensor dx = leaf(x, mesh, {cut}), dw = leaf(weight, mesh, {lies}), db = leaf(bias, mesh, {R});
        const at::Tensor dmean = spread(sample({4}, 1), mesh, {lies}),
                         dvariance = spread(sample({4}, 2).abs() + 1, mesh, {lies});
        CHECK(close(full_tensor(run(dx, dw, db, dmean, dvariance, spread(seed, mesh, {R}), training)), want));
        CHECK(placements_of(dmean) == Placements{lies});
        CHECK(close(full_tensor(dmean), mean));
        CHECK(close(full_tensor(dvariance), variance));
        CHECK(close(full_tensor(dx.grad()), px.grad()));
        CHECK(close(full_tensor(dw.grad()), pw.grad()));
        CHECK(close(full_tensor(db.grad()), pb.grad()));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("fill_diagonal_ in every layout, of matrices and cubes", {1, 2, 3, 4}) {
  for (const auto& shape : {std::vector<int64_t>{7, 3}, {3, 7}, {5, 5}, {4, 4, 4}, {6, 1}}) {
    for (const bool wrap : {false, true}) {
      const at::Tensor leaf = sample(shape).requires_grad_();
      const at::Tensor want = (leaf * 2).fill_diagonal_(5.5, wrap);
      (want * want).sum().backward();
      for (const Placement& placement : {R, S0, Shard(1)}) {
        CAPTURE(to_string(placement));
        const at::Tensor d = spread(sample(shape), line(), {placement}).requires_grad_();
        const at::Tensor got = (d * 2).fill_diagonal_(5.5, wrap);
        CHECK(placements_of(got) == Placements{placement});
        CHECK(close(full_tensor(got.detach()), want.detach()));
        (got * got).sum().backward();
        CHECK(close(full_tensor(d.grad()), leaf.grad()));
      }
    }
  }
  const at::Tensor oblong = spread(sample({2, 3, 3}), line(), {R});
  CHECK_THROWS_WITH_AS(at::Tensor(oblong).fill_diagonal_(1), doctest::Contains("sizes [2, 3, 3]"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("ldexp by a plain number, by whole numbers and by others", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    for (const Placement& placement : {R, S0, Shard(1), Partial()}) {
      CAPTURE(to_string(placement));
      const at::Tensor x = sample({5, 3}, 0, type), leaf = x.clone().requires_grad_();
      const at::Tensor d = spread(x, mesh, {placement}).requires_grad_();
      const double tolerance = type == at::kFloat ? 1e-6 : 1e-12;
      for (const at::Tensor& by : {at::scalar_tensor(2, at::kLong), at::scalar_tensor(1.5, at::kDouble)}) {
        CHECK(close(full_tensor(at::ldexp(d, by).detach()), at::ldexp(x, by), tolerance));
      }
      const at::Tensor whole = whole_numbers({3}, at::kLong) - 1;
      CHECK(close(full_tensor(at::ldexp(d, spread(whole, mesh, {R})).detach()), at::ldexp(x, whole), tolerance));
      at::ldexp(leaf, at::scalar_tensor(2, at::kLong)).square().sum().backward();
      at::ldexp(d, at::scalar_tensor(2, at::kLong)).square().sum().backward();
      CHECK(close(full_tensor(d.grad()), leaf.grad(), 1e-5));
      at::Tensor y = d.detach().clone();
      y.ldexp_(at::scalar_tensor(3, at::kLong));
      CHECK(close(full_tensor(y), at::ldexp(x, at::scalar_tensor(3, at::kLong)), tolerance));
    }
  }
}

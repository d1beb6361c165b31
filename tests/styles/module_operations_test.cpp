// Applies LibTorch's functions on modules and parameters to parallelized ones: to, clone, zero_grad, clip_grad_norm_,
// every optimizer, a scheduler.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/clone.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

const ParallelPlan kPlan = {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}};

torch::nn::Sequential make() {
  torch::nn::Sequential model(torch::nn::Linear(5, 6), torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                              torch::nn::Linear(6, 3));
  fill(*model);
  return model;
}

at::Tensor loss_of(const at::Tensor& y) { return (y - 0.5).square().mean(); }

std::shared_ptr<torch::nn::LinearImpl> first_linear(torch::nn::Module& model) {
  return std::dynamic_pointer_cast<torch::nn::LinearImpl>(model.children().at(0));
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;
template <class O, class Options>
MakeOptimizer maker(Options options) {
  return [options](const std::vector<at::Tensor>& parameters) { return std::make_unique<O>(parameters, options); };
}

}  // namespace

TESSERA_RANKS_TEST_CASE("all six optimizers and a scheduler take three steps as one process does", {1, 2, 3}) {
  namespace optim = torch::optim;
  struct Row {
    std::string why;
    MakeOptimizer make;
  };
  const std::vector<Row> rows = {
      {"Adagrad", maker<optim::Adagrad>(optim::AdagradOptions(0.05).weight_decay(0.01))},
      {"Adam", maker<optim::Adam>(optim::AdamOptions(0.01))},
      {"Adam, amsgrad", maker<optim::Adam>(optim::AdamOptions(0.01).amsgrad(true).weight_decay(0.01))},
      {"AdamW", maker<optim::AdamW>(optim::AdamWOptions(0.01))},
      {"RMSprop", maker<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.9).centered(true))},
      {"SGD", maker<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.01))},
      {"LBFGS", maker<optim::LBFGS>(optim::LBFGSOptions(0.5).max_iter(3))},
      {"LBFGS, strong Wolfe", maker<optim::LBFGS>(optim::LBFGSOptions(0.5).max_iter(3).line_search_fn("strong_wolfe"))},
  };
  const DeviceMesh mesh = tp_line();
  const at::Tensor x = numbers({4, 5});
  for (const Row& row : rows) {
    CAPTURE(row.why);
    auto want = make(), got = make();
    auto tp = parallelize_module(got, mesh, kPlan);
    const auto theirs = row.make(want->parameters()), ours = row.make(got->parameters());
    optim::StepLR their_schedule(*theirs, 2, 0.5), our_schedule(*ours, 2, 0.5);
    for (int i = 0; i < 3; ++i) {
      theirs->step([&] {
        theirs->zero_grad();
        const at::Tensor loss = loss_of(want->forward(x));
        loss.backward();
        return loss;
      });
      ours->step([&] {
        ours->zero_grad();
        const at::Tensor loss = loss_of(tp(x));
        loss.backward();
        return loss;
      });
      their_schedule.step();
      our_schedule.step();
    }
    check_parameters(*got, *want, /*gradients=*/false, 1e-10);
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_ clips by the norm over all ranks", {1, 2, 3}) {
  auto want = make(), got = make();
  auto tp = parallelize_module(got, tp_line(), kPlan);
  const at::Tensor x = numbers({4, 5});
  loss_of(want->forward(x)).backward();
  loss_of(tp(x)).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(want->parameters(), 0.01);
  CHECK(torch::nn::utils::clip_grad_norm_(got->parameters(), 0.01) == doctest::Approx(expected).epsilon(1e-12));
  check_parameters(*got, *want, /*gradients=*/true, 1e-12);
}

TESSERA_RANKS_TEST_CASE("zero_grad, to another dtype and back, train and eval", {1, 2}) {
  auto want = make(), got = make();
  auto tp = parallelize_module(got, tp_line(), kPlan);
  const at::Tensor x = numbers({4, 5});
  loss_of(tp(x)).backward();
  got->zero_grad(/*set_to_none=*/false);
  for (const at::Tensor& p : got->parameters()) CHECK(whole_value(p.grad()).abs().max().item<double>() == 0);
  got->zero_grad();
  for (const at::Tensor& p : got->parameters()) CHECK_FALSE(p.grad().defined());

  got->to(at::kFloat);
  want->to(at::kFloat);
  const auto linear = first_linear(*got);
  CHECK((linear->weight.scalar_type() == at::kFloat));
  CHECK(is_dtensor(linear->weight));
  CHECK(linear->weight.requires_grad());
  CHECK((to_local(linear->weight).scalar_type() == at::kFloat));
  const at::Tensor xf = x.to(at::kFloat);
  const at::Tensor y = tp(xf);
  CHECK(placements_of(y) == Placements{Replicate()});  // the copy has the contracts
  CHECK(difference(y, want->forward(xf)) <= 1e-5);
  got->to(device(), at::kDouble);
  got->eval();
  CHECK(difference(tp(x), want->forward(xf).to(at::kDouble)) <= 1e-5);
}

TESSERA_RANKS_TEST_CASE("clone copies pieces, layouts and contracts; the copy is its own", {1, 2}) {
  auto want = make(), got = make();
  parallelize_module(got, tp_line(), kPlan);
  const auto copied = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(got->clone());
  REQUIRE(copied != nullptr);
  const auto ours = got->named_parameters();
  for (const auto& item : copied->named_parameters()) {
    CAPTURE(item.key());
    REQUIRE(is_dtensor(item.value()));
    CHECK(placements_of(item.value()) == placements_of(ours[item.key()]));
    CHECK(item.value().requires_grad());
    CHECK_FALSE(to_local(item.value()).is_alias_of(to_local(ours[item.key()])));
  }
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : got->parameters()) p.zero_();
  }
  const at::Tensor x = numbers({4, 5});
  const ImplicitReplication guard;
  const at::Tensor y = copied->forward(x);
  CHECK(placements_of(y) == Placements{Replicate()});
  CHECK(difference(y, want->forward(x)) <= 1e-12);
  loss_of(y).backward();
  CHECK(first_linear(*copied)->weight.grad().defined());
}

TESSERA_RANKS_TEST_CASE("a reference, a shared_ptr, a holder and an AnyModule are all called alike", {2}) {
  const DeviceMesh mesh = tp_line();
  const at::Tensor x = numbers({4, 10});
  Mlp reference(10, 16, 12);
  fill(*reference);
  const at::Tensor want = reference->forward(x);
  const ParallelPlan plan = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
  const auto fresh = [] {
    Mlp mlp(10, 16, 12);
    fill(*mlp);
    return mlp;
  };
  Mlp a = fresh(), b = fresh(), c = fresh();
  auto by_reference = parallelize_module(*a, mesh, plan);
  auto by_pointer = parallelize_module(b.ptr(), mesh, plan);
  auto by_holder = parallelize_module(c, mesh, plan);
  torch::nn::AnyModule any(fresh());
  auto by_any = parallelize_module(any, mesh, plan);
  CHECK(difference(by_reference(x), want) <= 1e-12);
  CHECK(difference(by_pointer(x), want) <= 1e-12);
  CHECK(difference(by_holder(x), want) <= 1e-12);
  CHECK(difference(by_any(x), want) <= 1e-12);
  by_reference->eval();
  by_pointer->eval();
  by_holder->eval();
  by_any->eval();
  CHECK_FALSE(a->is_training());
  CHECK_FALSE(c->is_training());
  CHECK(by_holder->up.get() == c->up.get());
}

// Gives a styled parameter's operator a plain piece: it is this rank's part where a contract says so, and refused
// everywhere else, for every operator and every view of the parameter.

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bilinear.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensordot.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <doctest/doctest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::Linear;

using Forward = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)>;

// A Linear whose weight the module uses in an operator of its own; x is [8, 6].
struct FreeImpl : torch::nn::Module {
  explicit FreeImpl(Forward use) : lin(register_module("lin", Linear(torch::nn::LinearOptions(6, 8).bias(false)))) {
    forward_ = std::move(use);
  }
  at::Tensor forward(const at::Tensor& x) { return forward_(x, lin->weight); }
  Linear lin;
  Forward forward_;
};
TORCH_MODULE(Free);

struct Use {
  std::string why;
  Forward forward;
};

const std::vector<Use>& other_operators() {
  static const std::vector<Use> uses = {
      {"einsum",
       [](const at::Tensor& x, const at::Tensor& w) {
         return at::einsum("bi,oi->bo", {x, w});
       }},
      {"tensordot", [](const at::Tensor& x, const at::Tensor& w) { return at::tensordot(x, w, {1}, {1}); }},
      {"bmm",
       [](const at::Tensor& x, const at::Tensor& w) { return x.unsqueeze(0).bmm(w.t().unsqueeze(0)).squeeze(0); }},
      {"mm", [](const at::Tensor& x, const at::Tensor& w) { return at::mm(x, w.t()); }},
      {"mm of a permuted view",
       [](const at::Tensor& x, const at::Tensor& w) {
         return at::mm(x, w.permute({1, 0}));
       }},
      {"mm of a reshaped transpose",
       [](const at::Tensor& x, const at::Tensor& w) {
         return at::mm(x, w.t().reshape({-1}).reshape({6, 8}));
       }},
      {"mm of the rows", [](const at::Tensor& x, const at::Tensor& w) { return at::mm(x, w.split(4, 0)[1].t()); }},
      {"mv of one row", [](const at::Tensor& x, const at::Tensor& w) { return at::mv(x, w.select(0, 1)); }},
      {"cat",
       [](const at::Tensor& x, const at::Tensor& w) {
         return at::cat({x, w}, 0);
       }},
      {"mul", [](const at::Tensor& x, const at::Tensor& w) { return x * w.select(0, 0); }},
      {"bilinear",
       [](const at::Tensor& x, const at::Tensor& w) {
         return at::bilinear(x, x, w.unsqueeze(1).expand({8, 6, 6}));
       }},
  };
  return uses;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("a plain piece is refused in every operator that reads no contract; a DTensor goes by its rule",
                        {2}) {
  const DeviceMesh mesh = tp_line();
  for (const Use& use : other_operators()) {
    for (const int64_t dim : {0, 1}) {
      CAPTURE(use.why);
      CAPTURE(dim);
      Free module(use.forward);
      fill(*module);
      const at::Tensor x = numbers({8, 6});
      const at::Tensor want = module->forward(x);
      auto tp = parallelize_module(module, mesh, {{"lin", ColwiseParallel({.input_layouts = Shard(dim)})}});
      const std::string layout = dim == 0 ? "S(0)" : "S(1)";
      const std::string text =
          "is used with lin.weight, whose style ColwiseParallel says that it is this rank's piece, " + layout +
          "; give a DTensor";
      std::string message = "(nothing was thrown)";
      bool of_libtorch = false;
      try {
        tp(x.chunk(2, dim)[static_cast<std::size_t>(rank())]);
      } catch (const std::invalid_argument& error) {
        message = error.what();
      } catch (const c10::Error& error) {
        of_libtorch = true;
        message = error.what_without_backtrace();
      }
      CAPTURE(message);
      // A piece of the summed dimension does not fit a whole weight: einsum and similar operators throw their own
      // error.
      CHECK((message.find(text) != std::string::npos || (of_libtorch && dim == 1)));
      CHECK(difference(tp(distribute_tensor(x, mesh, {Shard(dim)})), want) <= 1e-13);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a plain piece is a piece in the operators of the contract, through views of the weight too",
                        {1, 2, 4}) {
  const DeviceMesh mesh = tp_line();
  const std::vector<Use> uses = {
      {"matmul", [](const at::Tensor& x, const at::Tensor& w) { return x.matmul(w.t()); }},
      {"matmul of a permuted view",
       [](const at::Tensor& x, const at::Tensor& w) {
         return x.matmul(w.permute({1, 0}));
       }},
      {"linear", [](const at::Tensor& x, const at::Tensor& w) { return at::linear(x, w); }},
      {"linear of a reshaped view",
       [](const at::Tensor& x, const at::Tensor& w) {
         return at::linear(x, w.unsqueeze(0).reshape({8, 6}));
       }},
  };
  for (const Use& use : uses) {
    CAPTURE(use.why);
    Free module(use.forward);
    fill(*module);
    const at::Tensor x = numbers({8, 6});
    const at::Tensor want = module->forward(x);
    auto tp = parallelize_module(module, mesh, {{"lin", ColwiseParallel({.input_layouts = Shard(0)})}});
    CHECK(difference(tp(x.chunk(world_size(), 0)[static_cast<std::size_t>(rank())]), want) <= 1e-13);
  }
}

TESSERA_RANKS_TEST_CASE(
    "a plain input with all features where a piece is expected is refused alike, and the job goes on", {2, 4}) {
  Linear module(8, 6), reference(8, 6);
  fill(*module);
  fill(*reference);
  auto tp = parallelize_module(module, tp_line(), RowwiseParallel());
  for (const at::Tensor& x : {numbers({3, 8}), numbers({2, 3, 8})}) {
    CHECK_THROWS_WITH_AS(tp(x), doctest::Contains("features that the product sums over"), std::invalid_argument);
    CHECK(difference(tp(x.chunk(world_size(), -1)[static_cast<std::size_t>(rank())]), reference->forward(x)) <= 1e-13);
  }
}

namespace {

// A product, and a bias that is added as a view.
struct RowBiasImpl : torch::nn::Module {
  RowBiasImpl() : lin(register_module("lin", Linear(6, 8))) {}
  at::Tensor forward(const at::Tensor& x) { return x.matmul(lin->weight.t()) + lin->bias.unsqueeze(0); }
  Linear lin;
};
TORCH_MODULE(RowBias);

}  // namespace

TESSERA_RANKS_TEST_CASE("a view of a bias beside a local result is cut as the bias is", {1, 2, 4}) {
  RowBias module, reference;
  fill(*module);
  fill(*reference);
  const at::Tensor x = numbers({3, 6});
  auto tp = parallelize_module(module, tp_line(), {{"lin", ColwiseParallel({.use_local_output = true})}});
  const at::Tensor y = tp(x);
  const at::Tensor want = reference->forward(x);
  CHECK(difference(y, want.chunk(world_size(), -1)[static_cast<std::size_t>(rank())]) <= 1e-13);
  y.square().sum().backward();
  want.square().sum().backward();
  check_parameters(*module, *reference, /*gradients=*/true, 1e-12);
}

TESSERA_RANKS_TEST_CASE("a bias beside a local result under InferenceMode; its kernels are there before any is made",
                        {1, 2, 4}) {
  for (const char* name : {"aten::add", "aten::add_"}) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "Tensor");
    CHECK(op.hasKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse3));
  }
  for (const at::Tensor& x : {numbers({3, 8}), numbers({2, 3, 8})}) {
    for (const bool columns : {true, false}) {
      CAPTURE(x.dim());
      CAPTURE(columns);
      Linear reference(8, 12), module(8, 12);
      fill(*reference);
      fill(*module);
      if (columns) {
        parallelize_module(module, tp_line(), ColwiseParallel({.use_local_output = true}));
      } else {
        parallelize_module(module, tp_line(), RowwiseParallel({.use_local_output = true}));
      }
      const auto here = [](const at::Tensor& t) {
        return t.chunk(world_size(), -1)[static_cast<std::size_t>(rank())].contiguous();
      };
      const c10::InferenceMode guard;
      const at::Tensor want = reference->forward(x), got = module->forward(columns ? x : here(x));
      REQUIRE_FALSE(is_dtensor(got));
      CHECK(difference(got, columns ? here(want) : want) <= 1e-13);
      // Other additions are not affected.
      const at::Tensor both = module->bias + module->bias;
      CHECK(difference(full_tensor(both), 2 * reference->bias) <= 1e-13);
    }
  }
}

TESSERA_RANKS_TEST_CASE("writing a styled parameter is no activation: copies, masks and optimizers go on", {2}) {
  const DeviceMesh mesh = tp_line();
  Mlp module(4, 8, 4), reference(4, 8, 4);
  fill(*module);
  fill(*reference);
  auto tp = parallelize_module(module, mesh,
                               {{"up", ColwiseParallel({.input_layouts = Shard(0)})}, {"down", RowwiseParallel()}});
  const at::Tensor values = numbers({4, 8}, 3), mask = (numbers({4, 8}, 4) > 0).to(at::kDouble);
  const ImplicitReplication guard;
  for (Mlp& m : std::vector<Mlp>{module, reference}) {
    const at::NoGradGuard no_grad;
    m->down->weight.copy_(values);
    m->down->weight.mul_(mask);
  }
  torch::optim::AdamW got(module->parameters()), want(reference->parameters());
  const at::Tensor x = numbers({6, 4});
  for (int step = 0; step < 2; ++step) {
    got.zero_grad();
    want.zero_grad();
    tp(x.chunk(2, 0)[static_cast<std::size_t>(rank())]).square().sum().backward();
    reference->forward(x).square().sum().backward();
    got.step();
    want.step();
  }
  check_parameters(*module, *reference, /*gradients=*/false, 1e-12);
}

namespace {

template <class Optimizer>
std::string step_error(bool guarded, Optimizer& optimizer, Parallelized<Linear>& tp) {
  tp(at::ones({2, 8}, on(at::kDouble))).sum().backward();
  const ImplicitReplication guard(guarded);
  try {
    optimizer.step();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

}  // namespace

TESSERA_RANKS_TEST_CASE("an optimizer whose state is older than the layouts: its step says so", {2}) {
  const std::string hint =
      "one that was made, stepped or filled by torch::load before parallelize_module keeps plain state; make it "
      "afterwards, and use load_optimizer";
  for (const bool guarded : {false, true}) {
    CAPTURE(guarded);
    Linear one(8, 4), two(8, 4), three(8, 4);
    for (Linear& m : std::vector<Linear>{one, two, three}) fill(*m);
    torch::optim::SGD stepped(one->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    one->forward(at::ones({2, 8}, on(at::kDouble))).sum().backward();
    stepped.step();
    torch::optim::Adagrad made(two->parameters());  // its constructor makes its state
    auto tp_one = parallelize_module(one, tp_line(), ColwiseParallel());
    auto tp_two = parallelize_module(two, tp_line(), ColwiseParallel());
    auto tp_three = parallelize_module(three, tp_line(), ColwiseParallel());
    torch::optim::Adagrad after(three->parameters());
    const std::string of_sgd = step_error(guarded, stepped, tp_one), of_adagrad = step_error(guarded, made, tp_two);
    CAPTURE(of_sgd);
    CAPTURE(of_adagrad);
    CHECK(of_sgd.find(hint) != std::string::npos);
    CHECK(of_adagrad.find(hint) != std::string::npos);
    CHECK(step_error(guarded, after, tp_three) == "(nothing was thrown)");
  }
}

TESSERA_RANKS_TEST_CASE("a layout that the tensor cannot have: the error names module and style", {2}) {
  const DeviceMesh mesh = tp_line();
  const auto message_of = [&](const Style& style, const at::Tensor& x) -> std::string {
    Mlp module(4, 8, 4);
    module->to(device());
    auto tp = parallelize_module(module, mesh, {{"up", style}});
    try {
      tp(x);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "(nothing was thrown)";
  };
  CHECK(message_of(ColwiseParallel({.output_layouts = Shard(5)}), at::ones({2, 4}, on(at::kFloat))) ==
        "addmm with up.weight (ColwiseParallel): the style lays the output out as S(5), and it is [2, 8], of 2 "
        "dimensions; give the style a layout that fits");
  CHECK(
      message_of(RowwiseParallel({.desired_input_layouts = Shard(-4)}), at::ones({2, 3, 2}, on(at::kFloat)))
          .find(
              "matmul with up.weight (RowwiseParallel): the style lays the input out as S(-4), and it is [2, 3, 4]") ==
      0);
  CHECK(
      message_of(ColwiseParallel({.input_layouts = Shard(2)}), at::ones({2, 4}, on(at::kFloat)))
          .find(
              "addmm with up.weight (ColwiseParallel): the style lays the plain input out as S(2), and it is [2, 4]") ==
      0);
}

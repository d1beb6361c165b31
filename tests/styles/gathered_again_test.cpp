// Tests ColwiseParallel that does not keep its gathered input: the numbers are the same, with one more all_gather.

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/recorder.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

torch::nn::Linear linear(bool bias) {
  torch::nn::Linear out(torch::nn::LinearOptions(6, 10).bias(bias));
  out->to(device(), at::kDouble);
  const c10::AutoGradMode none(false);
  out->weight.copy_(sample({10, 6}, 4));
  if (bias) out->bias.copy_(sample({10}, 5));
  return out;
}

// A linear layer that keeps its weight transposed.
struct Conv1DImpl : torch::nn::Module {
  Conv1DImpl()
      : weight(register_parameter("weight", sample({6, 10}, 4).to(device()))),
        bias(register_parameter("bias", sample({10}, 5).to(device()))) {}
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight).add(bias); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Conv1D);

ColwiseParallel style(int64_t sequence_dim, bool again) {
  return ColwiseParallel(
      {.input_layouts = Shard(sequence_dim), .desired_input_layouts = Replicate(), .gather_input_again = again});
}

template <class Layer>
void check_alike(Layer layer, Layer one, const at::Tensor& whole, int64_t sequence_dim, const DeviceMesh& mesh) {
  auto tp = parallelize_module(layer, mesh, style(sequence_dim, true));
  const at::Tensor want_x = leaf(whole), x = leaf(spread(whole, mesh, {Shard(sequence_dim)}));
  const at::Tensor want = one(want_x), y = tp(x);
  CHECK(close(full_tensor(y.detach()), want.detach()));
  const at::Tensor g = sample(want.sizes(), 6);
  want.backward(g);
  const CommCounter counter(mesh);
  y.backward(spread(g, mesh, {Shard(want.dim() - 1)}));
  CHECK(counter.count("all_gather") == (mesh.size() > 1 ? 1 : 0));
  // A few rows of many ranks are reduced by an all_reduce, since the largest part decides the cost of the other.
  CHECK(counter.count("reduce_scatter") + counter.count("all_reduce") == (mesh.size() > 1 ? 1 : 0));
  CHECK(counter.total() == (mesh.size() > 1 ? 2 : 0));
  CHECK(placements_of(x.grad()) == Placements{Shard(sequence_dim)});
  CHECK(close(full_tensor(x.grad()), want_x.grad()));
  CHECK(close(full_tensor(layer->weight.grad()), one->weight.grad()));
  if (one->bias.defined()) CHECK(close(full_tensor(layer->bias.grad()), one->bias.grad()));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("an input that is gathered again gives what one that is kept does", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const bool bias : {false, true}) {
    const auto check = [&](const at::Tensor& whole, int64_t sequence_dim) {
      check_alike(linear(bias), linear(bias), whole, sequence_dim, mesh);
    };
    check(sample({2, 12, 6}), 1);
    check(sample({7, 2, 6}), 0);  // uneven, and empty on the last of four ranks
    check(sample({5, 6}), 0);
    check(sample({1, 6}), 0);
  }
  check_alike(Conv1D(), Conv1D(), sample({2, 5, 6}), 1, mesh);
  check_alike(Conv1D(), Conv1D(), sample({5, 6}), 0, mesh);
}

TESSERA_RANKS_TEST_CASE("it is gathered in forward and in backward, and where nothing is to be gathered nothing is",
                        {2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const bool again : {false, true}) {
    torch::nn::Linear layer = linear(true);
    auto tp = parallelize_module(layer, mesh, style(1, again));
    const at::Tensor x = leaf(piece_of(sample({2, 12, 6}), mesh, {Shard(1)}));
    CommCounter counter(mesh);
    const at::Tensor y = tp(x);
    CHECK(counter.count("all_gather") == 1);
    CHECK(counter.total() == 1);
    counter.reset();
    y.sum().backward();
    CHECK(counter.count("all_gather") == (again ? 1 : 0));
    CHECK(counter.count("reduce_scatter") == 1);
    CHECK(counter.total() == (again ? 2 : 1));
    const at::Tensor matrix = leaf(piece_of(sample({12, 6}), mesh, {Shard(0)}));
    auto by_rows = parallelize_module(linear(true), mesh, style(0, again));
    const at::Tensor z = by_rows(matrix);
    counter.reset();
    z.sum().backward();
    CHECK(counter.count("all_gather") == (again ? 1 : 0));
    CHECK(counter.count("reduce_scatter") == 1);
    counter.reset();
    tp(spread(sample({2, 12, 6}), mesh, {Replicate()}));
    CHECK(counter.total() == 0);
    const c10::AutoGradMode none(false);
    tp(x);
    CHECK(counter.total() == 1);
  }
}

TESSERA_RANKS_TEST_CASE("gradients of gradients of an input that is gathered again, and of a bias added within",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const bool has_bias : {false, true}) {
    CAPTURE(has_bias);
    torch::nn::Linear layer = linear(has_bias), one = linear(has_bias);
    parallelize_module(layer, mesh, style(1, true));
    // A module adds its bias after the product; at::linear may add it within.
    const auto penalty = [](const torch::nn::Linear& module, const at::Tensor& x) {
      const at::Tensor loss = at::linear(x, module->weight, module->bias).pow(3).sum();
      return torch::autograd::grad({loss}, {x}, {}, true, true)[0].pow(2).sum();
    };
    const at::Tensor whole = leaf(sample({2, 12, 6})), x = leaf(spread(whole.detach(), mesh, {Shard(1)}));
    penalty(one, whole).backward();
    const std::size_t before = mesh.world().recorder().records().size();
    penalty(layer, x).backward();
    const std::vector<Record> records = mesh.world().recorder().records();
    const auto adds_within = [](const Record& record) { return record.name == "tessera::dense_bias"; };
    CHECK(std::count_if(records.begin() + static_cast<std::ptrdiff_t>(before), records.end(), adds_within) ==
          (has_bias ? 1 : 0));
    CHECK(close(full_tensor(x.grad()), whole.grad(), 1e-11));
    CHECK(close(full_tensor(layer->weight.grad()), one->weight.grad(), 1e-11));
    if (has_bias) CHECK(close(full_tensor(layer->bias.grad()), one->bias.grad(), 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("gather_input_again is for ColwiseParallel of a linear layer alone", {1}) {
  const auto refused = [](auto module, const Style& given) {
    module->to(device());
    CHECK_THROWS_WITH_AS(parallelize_module(module, line(), given), doctest::Contains("gather_input_again is for"),
                         std::invalid_argument);
  };
  refused(linear(true), RowwiseParallel({.gather_input_again = true}));
  refused(torch::nn::Embedding(4, 4), ColwiseParallel({.gather_input_again = true}));
  refused(torch::nn::MultiheadAttention(4, 2), ColwiseParallel({.gather_input_again = true}));
  CHECK(ColwiseParallel({.gather_input_again = true}).to_string() == "ColwiseParallel(input gathered again)");
}

TESSERA_RANKS_TEST_CASE("a product keeps its input for the weight's gradient alone: of a frozen weight not", {1, 2}) {
  const DeviceMesh mesh = line();
  for (const bool trains : {false, true}) {
    torch::nn::Linear layer = linear(false);
    layer->weight.requires_grad_(trains);
    auto tp = parallelize_module(layer, mesh, ColwiseParallel());
    const at::Tensor x = leaf(spread(sample({2, 3, 6}), mesh, {Replicate()})), activation = x * 2;
    const std::size_t before = activation.use_count();
    const at::Tensor y = tp(activation);
    CHECK((activation.use_count() > before) == trains);
    y.sum().backward();
    CHECK(close(full_tensor(x.grad()), at::matmul(at::full({2, 3, 10}, 2, on(at::kDouble)), sample({10, 6}, 4))));
  }
}

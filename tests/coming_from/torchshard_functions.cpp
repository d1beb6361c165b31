// Tests TorchShard's losses and functions of document 003, with each of their parameters, against one process.

#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <doctest/doctest.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/parallelism.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A loss of logits [13, 17], and what LibTorch computes.
struct Loss {
  at::Tensor logits = sample({13, 17}) * 1000, target = at::remainder(at::arange(13) * 5, 17);
  ParallelCrossEntropyOptions options = {};

  at::Tensor in_one_process(const at::Tensor& x) const {
    return at::cross_entropy_loss(x, target, options.weight, options.reduction, options.ignore_index);
  }
};

using LossFunction = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const ParallelCrossEntropyOptions&);
at::Tensor by_module(const at::Tensor& x, const at::Tensor& target, const ParallelCrossEntropyOptions& options) {
  return ParallelCrossEntropyLoss(options)->forward(x, target);
}

// Compares the loss of logits that are sharded along the classes, and of whole ones, with LibTorch.
void check_loss(const Loss& loss, LossFunction compute, const DeviceMesh& mesh) {
  const at::Tensor whole = leaf(loss.logits), want = loss.in_one_process(whole);
  want.sum().backward();
  const at::Tensor cut = leaf(spread(loss.logits, mesh, {Shard(1)})), got = compute(cut, loss.target, loss.options);
  CHECK(close(got.detach(), want.detach()));
  got.sum().backward();
  CHECK(close(full_tensor(cut.grad()), whole.grad()));
  const at::Tensor plain = leaf(loss.logits), alone = compute(plain, loss.target, loss.options);
  CHECK(same(alone.detach(), want.detach()));
  alone.sum().backward();
  CHECK(close(plain.grad(), whole.grad()));
}

// Checks the older argument together with each value of the other one.
void check_legacy(bool of_size_average, LossFunction compute, const DeviceMesh& mesh) {
  using Flag = std::optional<bool>;
  for (const bool value : {false, true}) {
    for (const Flag other : {Flag(), Flag(false), Flag(true)}) {
      const Flag average = of_size_average ? Flag(value) : other, reduce = of_size_average ? other : Flag(value);
      const auto wanted = reduce == Flag(false)    ? at::Reduction::None
                          : average == Flag(false) ? at::Reduction::Sum
                                                   : at::Reduction::Mean;
      CHECK(legacy_reduction(average, reduce) == wanted);
      Loss loss;
      loss.options.reduction = *legacy_reduction(average, reduce);
      const at::Tensor cut = spread(loss.logits, mesh, {Shard(1)});
      CHECK(close(compute(cut, loss.target, loss.options),
                  at::cross_entropy_loss(loss.logits, loss.target, {}, wanted, -100)));
    }
  }
  CHECK_FALSE(legacy_reduction(std::nullopt, std::nullopt).has_value());
}

// Holds the subcases of the options that the module and the function share.
void check_options(LossFunction compute, const DeviceMesh& mesh) {
  Loss loss;
  SUBCASE("weight") {
    loss.options.weight = at::rsub(sample({17}, 2), 1.5);
    check_loss(loss, compute, mesh);
  }
  SUBCASE("size_average") { check_legacy(/*of_size_average=*/true, compute, mesh); }
  SUBCASE("ignore_index") {
    for (const int64_t ignored : {5, -1}) {
      loss.options.ignore_index = ignored;
      loss.target[3] = ignored;
      check_loss(loss, compute, mesh);
    }
  }
  SUBCASE("reduce") { check_legacy(/*of_size_average=*/false, compute, mesh); }
  SUBCASE("reduction") {
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
      loss.options.reduction = reduction;
      check_loss(loss, compute, mesh);
    }
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("ParallelCrossEntropyLoss", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  check_options(by_module, mesh);
  SUBCASE("recognizes sharded input") {
    const Loss loss;
    const at::Tensor cut = leaf(spread(loss.logits, mesh, {Shard(1)}));
    CommCounter counter(mesh);
    const at::Tensor got = ParallelCrossEntropyLoss(loss.options)->forward(cut, loss.target);
    CHECK(counter.count("all_reduce") == (mesh.size() > 1 ? 2 : 0));
    CHECK(counter.total() == counter.count("all_reduce"));  // the logits are not gathered
    CHECK(close(got.detach(), loss.in_one_process(loss.logits)));
    counter.reset();
    got.backward();
    CHECK(counter.total() == 0);
  }
  SUBCASE("plain input as CrossEntropyLoss") {
    const Loss loss;
    CommCounter counter(mesh);
    const at::Tensor got = ParallelCrossEntropyLoss(loss.options)->forward(loss.logits, loss.target);
    CHECK(counter.total() == 0);
    CHECK_FALSE(is_dtensor(got));
    CHECK(same(got, loss.in_one_process(loss.logits)));
  }
}

TESSERA_RANKS_TEST_CASE("functional.parallel_cross_entropy", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  Loss loss;
  SUBCASE("input") {
    check_loss(loss, parallel_cross_entropy, mesh);
    loss.logits = sample({2, 17, 3});  // the classes are a middle dimension, as in images
    loss.target = at::remainder(at::arange(6), 17).view({2, 3});
    check_loss(loss, parallel_cross_entropy, mesh);
  }
  SUBCASE("target") {
    for (const int64_t id : {0, 8, 16}) {
      loss.target = at::full({13}, id, at::kLong);
      check_loss(loss, parallel_cross_entropy, mesh);
    }
  }
  check_options(parallel_cross_entropy, mesh);
}

TESSERA_RANKS_TEST_CASE("RegisterParallelDim", {1, 3}) {
  const DeviceMesh mesh = line();
  SUBCASE("dim") {
    const int64_t n = mesh.size();
    const at::Tensor x = sample({3, 2});
    const auto marked = [&](ParallelDim dim) { return RegisterParallelDim(dim, mesh)->forward(x); };
    CHECK(get_parallel_dim(marked(0)) == ParallelDim(0));
    CHECK(marked(0).sizes() == at::IntArrayRef({3 * n, 2}));
    CHECK(get_parallel_dim(marked(-1)) == ParallelDim(1));
    CHECK(marked(1).sizes() == at::IntArrayRef({3, 2 * n}));
    CHECK(is_dtensor(marked(std::nullopt)));
    CHECK(marked(std::nullopt).sizes() == x.sizes());
    for (const ParallelDim dim : {ParallelDim(), ParallelDim(0), ParallelDim(1)}) CHECK(same(to_local(marked(dim)), x));
    CHECK_THROWS_WITH_AS(marked(2), doctest::Contains("dim 2 of a tensor of 2 dimensions"), std::invalid_argument);
    const std::vector<at::Tensor> list = register_parallel_dim(std::vector<at::Tensor>{x, x}, 1, mesh);
    CHECK(get_parallel_dim(list[1]) == ParallelDim(1));
  }
}

TESSERA_RANKS_TEST_CASE("get_parallel_dim", {1, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({3, 2});
  CHECK_FALSE(get_parallel_dim(x).has_value());
  CHECK_FALSE(get_parallel_dim(register_parallel_dim(x, std::nullopt, mesh)).has_value());
  for (const int64_t dim : {0, 1}) CHECK(get_parallel_dim(register_parallel_dim(x, dim, mesh)) == ParallelDim(dim));
}

namespace {

// The layouts of input, weight, bias and output for a dim.
struct LinearCut {
  ParallelDim dim;
  Placement x, w, b, y;
};

std::vector<LinearCut> cuts() {
  return {{std::nullopt, Replicate(), Replicate(), Replicate(), Replicate()},
          {0, Shard(1), Shard(1), Replicate(), Replicate()},
          {1, Replicate(), Shard(0), Shard(0), Shard(1)},
          {-1, Replicate(), Shard(0), Shard(0), Shard(1)}};
}

// Holds this rank's pieces of a linear function's tensors, and the pieces of what one process computes from the whole.
struct Product {
  Product(const LinearCut& cut, int64_t rows, bool biased, const DeviceMesh& mesh) {
    const auto piece = [&](const at::Tensor& whole, const Placement& lies) { return piece_of(whole, mesh, {lies}); };
    const at::Tensor whole_x = leaf(sample({rows, 12})), whole_w = leaf(sample({24, 12}, 2)),
                     whole_b = leaf(sample({24}, 3));
    x = leaf(piece(whole_x, cut.x));
    w = leaf(piece(whole_w, cut.w));
    b = leaf(piece(whole_b, cut.b));
    const at::Tensor whole = at::linear(whole_x, whole_w, biased ? std::make_optional(whole_b) : std::nullopt);
    y = parallel_linear(x, w, biased ? b : at::Tensor(), cut.dim, mesh);
    const at::Tensor g = sample(whole.sizes(), 4);
    whole.backward(g);
    y.backward(piece(g, cut.y));
    want_y = piece(whole, cut.y);
    want_dx = piece(whole_x.grad(), cut.x);
    want_dw = piece(whole_w.grad(), cut.w);
    if (biased) want_db = piece(whole_b.grad(), cut.b);
  }
  at::Tensor x, w, b, y, want_y, want_dx, want_dw, want_db;
};

}  // namespace

TESSERA_RANKS_TEST_CASE("functional.parallel_linear", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  SUBCASE("input") {
    for (const LinearCut& cut : cuts()) {
      for (const int64_t rows : {4, 7}) {
        const Product p(cut, rows, true, mesh);
        CHECK(close(p.y.detach(), p.want_y));
        CHECK(close(p.x.grad(), p.want_dx));
      }
    }
    const at::Tensor x = sample({4, 12}), w = sample({24, 12}, 2);  // a DTensor has its own layout
    const at::Tensor got = parallel_linear(spread(x, mesh, {Replicate()}), piece_of(w, mesh, {Shard(1)}), {}, 0, mesh);
    CHECK(close(got, at::linear(x, w)));
    const DeviceMesh plane = mesh_over({1, mesh.size()});
    CHECK_THROWS_WITH_AS(parallel_linear(x, w, {}, 0, plane), doctest::Contains("has 2 dimensions; give one of them"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(parallel_linear(spread(x, plane, {Replicate(), Replicate()}), w, {}, 0, mesh),
                         doctest::Contains("the input is on mesh"), std::invalid_argument);
  }
  SUBCASE("weight") {
    for (const LinearCut& cut : cuts()) {
      const Product p(cut, 4, true, mesh);
      CHECK(close(p.w.grad(), p.want_dw));
    }
  }
  SUBCASE("bias") {
    for (const LinearCut& cut : cuts()) {
      const Product with(cut, 4, true, mesh), without(cut, 4, false, mesh);
      CHECK(close(with.b.grad(), with.want_db));
      CHECK(close(without.y.detach(), without.want_y));
    }
  }
  SUBCASE("dim") {
    for (const LinearCut& cut : cuts()) {
      const Product p(cut, 4, true, mesh);
      CHECK(p.y.size(1) == (cut.y.is_shard() ? 24 / mesh.size() : 24));
      CHECK(close(p.y.detach(), p.want_y));
    }
    CHECK_THROWS_WITH_AS(parallel_linear(sample({4, 12}), sample({24, 12}), {}, 2, mesh),
                         doctest::Contains("it is 0, 1, -1 or none"), std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("shard_init_helper_", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const auto begun = [](const InitMethod& method, const DeviceMesh& on, const Placement& placement) {
    begin_draws(on);
    const at::Tensor tensor = tessera::empty({12, 7}, on, {placement}, at::kDouble);
    shard_init_(method, tensor);
    return full_tensor(tensor);
  };
  const auto check = [&](const InitMethod& method) {
    const at::Tensor want = begun(method, alone(), Replicate());
    for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
      CHECK(same(begun(method, mesh, placement), want));
    }
    return want;
  };
  SUBCASE("init_method") {
    const at::Tensor normal = check([](at::Tensor t) { torch::nn::init::normal_(t); });
    const at::Tensor xavier = check([](at::Tensor t) { torch::nn::init::xavier_uniform_(t); });
    CHECK(normal.abs().max().item<double>() > 1.5);
    CHECK(xavier.abs().max().item<double>() <= std::sqrt(6.0 / 19));
  }
  SUBCASE("tensor") {
    check(quarters());
    const at::Tensor plain = at::zeros({3});
    shard_init_([](at::Tensor t) { torch::nn::init::ones_(t); }, plain);
    CHECK(same(plain, at::ones({3})));
  }
  SUBCASE("kwargs") {  // the method holds its own
    for (const double bound : {0.3, 0.7}) {
      const at::Tensor values = check([=](at::Tensor t) { torch::nn::init::uniform_(t, -bound, bound); });
      CHECK(values.abs().max().item<double>() <= bound);
      CHECK(values.abs().max().item<double>() > bound * 0.9);
    }
  }
}

TESSERA_RANKS_TEST_CASE("distributed.init_process_group", {4}) {
  SUBCASE("group_size") {
    for (const int64_t size : {1, 2, 4}) {
      init_parallelism({.model = size, .world = world()});
      const DeviceMesh group = parallel_group_info().mp.mesh;
      CHECK(group.size() == size);
      ParallelLinear layer(8, 12, group, ParallelDimOptions{.dim = 0});
      layer->to(at::kDouble);
      const at::Tensor x = sample({3, 8}, world()->rank() / size);  // each group has its own rows
      const at::Tensor want = at::linear(x, full_tensor(layer->weight.detach()), full_tensor(layer->bias.detach()));
      CHECK(close(full_tensor(layer->forward(x).detach()), want));
      reset_parallelism();
    }
  }
}

TESSERA_RANKS_TEST_CASE("note: TensorFloat32 is left to LibTorch's own setting", {2}) {
  const DeviceMesh mesh = line();
  for (const bool allowed : {false, true}) {
    at::globalContext().setAllowTF32CuBLAS(allowed);
    ParallelLinear layer(6, 8, mesh, ParallelDimOptions{.dim = 1});
    layer->forward(sample({3, 6}, 1, at::kFloat));
    CHECK(at::globalContext().allowTF32CuBLAS() == allowed);
  }
  at::globalContext().setAllowTF32CuBLAS(false);
}

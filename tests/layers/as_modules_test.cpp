// Uses every named layer as a module of LibTorch: in AnyModule and Sequential, cloned, printed, and with parameters
// assigned.

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <doctest/doctest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/pairwise.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/clone.h"
#include "tessera/styles/hooks.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor whole_of(const at::Tensor& t) { return is_dtensor(t) ? full_tensor(t.detach()) : t.detach(); }

// Says whether both have the same layout, and the same bits on this rank.
bool alike(const at::Tensor& a, const at::Tensor& b) {
  if (is_dtensor(a) != is_dtensor(b)) return false;
  if (!is_dtensor(a)) return same(a.detach(), b.detach());
  return placements_of(a) == placements_of(b) && a.sizes() == b.sizes() &&
         same(to_local(a.detach()), to_local(b.detach()));
}

std::string printed(const torch::nn::Module& module) {
  std::ostringstream out;
  out << module;
  return out.str();
}

// Gives parameters other values than the first ones, some of them 0; freezes every second one where `freeze`.
void stir(torch::nn::Module& module, bool freeze) {
  int64_t i = 0;
  for (const auto& each : module.named_parameters()) {
    const c10::AutoGradMode none(false);
    at::Tensor(*each).uniform_(-1, 1);
    at::Tensor(*each).set_requires_grad(!freeze || ++i % 2 == 1);
  }
}

void check_gradients_alike(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto theirs = b.named_parameters();
  for (const auto& each : a.named_parameters()) {
    const at::Tensor &mine = each->grad(), &other = theirs[each.key()].grad();
    CHECK(each->requires_grad() == theirs[each.key()].requires_grad());
    REQUIRE(mine.defined() == other.defined());
    if (mine.defined()) CHECK(alike(mine, other));
  }
}

// A user's module that LibTorch clones.
template <class Holder>
struct AroundImpl : torch::nn::Cloneable<AroundImpl<Holder>> {
  explicit AroundImpl(std::function<Holder()> make) : make(std::move(make)) { reset(); }
  void reset() override { inner = this->register_module("inner", make()); }
  std::function<Holder()> make;
  Holder inner{nullptr};
};

// Checks that a copy has parameters of its own, with the same layouts and values, and that it trains.
template <class Impl, class... Inputs>
void check_copy(Impl& layer, Impl& copy, const Inputs&... inputs) {
  CHECK(&layer != &copy);
  CHECK(printed(copy) == printed(layer));
  const auto mine = layer.named_parameters(), theirs = copy.named_parameters();
  REQUIRE(mine.keys() == theirs.keys());
  for (const auto& each : mine) {
    const at::Tensor& other = theirs[each.key()];
    CHECK_FALSE(each->is_same(other));
    CHECK_FALSE(each->grad().defined());
    CHECK(alike(*each, other));
  }
  const at::Tensor want = layer.forward(inputs...), got = copy.forward(inputs...);
  CHECK(alike(got, want));
  if (!want.requires_grad()) return;
  want.pow(2).sum().backward();
  got.pow(2).sum().backward();
  check_gradients_alike(layer, copy);
  std::vector<at::Tensor> before;
  for (const at::Tensor& each : layer.parameters()) before.push_back(each.detach().clone());
  torch::optim::SGD optimizer(copy.parameters(), 0.5);
  optimizer.step();
  std::size_t i = 0;
  bool moved = false;
  for (const auto& each : mine) {
    CHECK(alike(*each, before[i++]));
    if (each->requires_grad() && !alike(*each, theirs[each.key()])) moved = true;
  }
  // A rank may have an empty piece.
  if (layer.parameters().size() > 0 && to_local(before.front()).numel() > 0) CHECK(moved);
  layer.zero_grad();
}

template <class Holder, class... Inputs>
void check_module(const DeviceMesh& mesh, const std::string& text, const std::function<Holder()>& make,
                  const Inputs&... inputs) {
  using Impl = typename Holder::ContainedType;
  CAPTURE(text);
  for (const bool freeze : {false, true}) {
    CAPTURE(freeze);
    Holder layer = make();
    stir(*layer, freeze);
    CHECK(printed(*layer) == text);
    const at::Tensor direct = layer->forward(inputs...);
    torch::nn::AnyModule any(layer);
    CHECK(alike(any.forward(inputs...), direct));
    torch::nn::Sequential sequence(layer);
    CHECK(alike(sequence->forward(inputs...), direct));
    CHECK(printed(*sequence) == "torch::nn::Sequential(\n  (0): " + text + "\n)");

    manual_seed(11, mesh.world());
    const at::Tensor drawn = tessera::rand({4}, mesh, {Replicate()});
    manual_seed(11, mesh.world());
    const CommCounter counter(mesh);
    const auto copy = std::dynamic_pointer_cast<Impl>(layer->clone());
    REQUIRE(copy != nullptr);
    CHECK(counter.total() == 0);
    CHECK(alike(tessera::rand({4}, mesh, {Replicate()}), drawn));
    check_copy(*layer, *copy, inputs...);
    const auto in_sequence = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(sequence->clone());
    check_copy(*layer, *in_sequence->ptr<Impl>(0), inputs...);
    check_copy(*layer, *std::dynamic_pointer_cast<Impl>(any.clone().ptr()), inputs...);

    AroundImpl<Holder> around(make);
    stir(around, freeze);
    const auto copied = std::dynamic_pointer_cast<AroundImpl<Holder>>(tessera::clone_module(around));
    check_copy(*around.inner, *copied->inner, inputs...);
  }
}

ModelParallelConfig doubles(bool sequence = false) {
  return {.params_dtype = at::kDouble, .sequence_parallel = sequence};
}

const std::vector<std::pair<int64_t, int64_t>> kSizes = {{12, 24}, {7, 5}, {1, 1}};

std::string head_of(const char* name, int64_t in, int64_t out) {
  return "tessera::" + std::string(name) + "(input_size=" + std::to_string(in) + ", output_size=" + std::to_string(out);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("ColumnParallelLinear in containers, printed and cloned", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const auto& [in, out] : kSizes) {
    const at::Tensor x = sample({5, in});
    for (const bool gather : {false, true}) {
      ColumnParallelOptions options(in, out);
      options.gather_output = gather;
      options.allow_uneven = true;
      options.config = doubles();
      const std::string head = head_of("ColumnParallelLinear", in, out);
      const std::string gathers = std::string(", gather_output=") + (gather ? "true" : "false");
      const std::string rest = ", allow_uneven=true, params_dtype=Double)";
      const auto make = [&] { return ColumnParallelLinear(options, mesh); };
      check_module<ColumnParallelLinear>(mesh, head + ", bias=true" + gathers + rest, make, x);
      check_module<ColumnParallelLinear>(mesh, head + ", bias=true" + gathers + rest, make,
                                         spread(x, mesh, {Replicate()}));
      options.bias = false;
      options.lora_rank = 2;
      check_module<ColumnParallelLinear>(
          mesh, head + ", bias=false" + gathers + ", allow_uneven=true, lora_rank=2, params_dtype=Double)", make, x);
    }
  }
  ColumnParallelOptions options(12, 24);
  options.config = doubles(true);
  options.stride = 2;
  check_module<ColumnParallelLinear>(
      mesh,
      head_of("ColumnParallelLinear", 12, 24) +
          ", bias=true, gather_output=false, stride=2, params_dtype=Double, "
          "sequence_parallel=true)",
      [&] { return ColumnParallelLinear(options, mesh); }, sample({2, 12}));
  CHECK(printed(*ColumnParallelLinear(ColumnParallelOptions::megatron(3, 12), mesh)) ==
        "tessera::ColumnParallelLinear(input_size=3, output_size=12, bias=true, gather_output=false)");
}

TESSERA_RANKS_TEST_CASE("RowParallelLinear in containers, printed and cloned", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const auto& [in, out] : kSizes) {
    const at::Tensor x = sample({5, in});
    RowParallelOptions options(in, out);
    options.allow_uneven = true;
    options.config = doubles();
    const std::string head = head_of("RowParallelLinear", in, out);
    const std::string rest = ", allow_uneven=true, params_dtype=Double)";
    const auto make = [&] { return RowParallelLinear(options, mesh); };
    check_module<RowParallelLinear>(mesh, head + ", bias=true, input_is_parallel=false" + rest, make, x);
    check_module<RowParallelLinear>(mesh, head + ", bias=true, input_is_parallel=false" + rest, make,
                                    spread(x, mesh, {Shard(1)}));
    options.input_is_parallel = true;
    options.lora_rank = 3;
    check_module<RowParallelLinear>(
        mesh, head + ", bias=true, input_is_parallel=true, allow_uneven=true, lora_rank=3, params_dtype=Double)", make,
        piece_of(x, mesh, {Shard(1)}));
  }
}

TESSERA_RANKS_TEST_CASE("ParallelEmbedding in containers, printed and cloned", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor ids = at::remainder(at::arange(15) * 5, 7).view({5, 3});
  const std::vector<std::pair<EmbeddingCut, std::string>> cuts = {
      {EmbeddingCut::kVocabulary, "vocabulary"}, {EmbeddingCut::kWidth, "width"}, {EmbeddingCut::kNone, "none"}};
  for (const auto& [cut, name] : cuts) {
    for (const int64_t width : {5, 1}) {
      ParallelEmbeddingOptions options(7, width);
      options.cut = cut;
      options.padding_idx = -2;
      options.allow_uneven = true;
      options.config = doubles();
      const std::string text = "tessera::ParallelEmbedding(num_embeddings=7, embedding_dim=" + std::to_string(width) +
                               ", cut=" + name + ", padding_idx=5, allow_uneven=true, params_dtype=Double)";
      const auto make = [&] { return ParallelEmbedding(options, mesh); };
      check_module<ParallelEmbedding>(mesh, text, make, ids);
      check_module<ParallelEmbedding>(mesh, text, make, spread(ids, mesh, {Shard(0)}));
    }
  }
  CHECK(printed(*vocab_parallel_embedding(12, 6, mesh, init_method(InitType::kNormal))) ==
        "tessera::ParallelEmbedding(num_embeddings=12, embedding_dim=6, cut=vocabulary)");
}

TESSERA_RANKS_TEST_CASE("ParallelLinear, the loss and RegisterParallelDim in containers, printed and cloned",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const std::vector<std::pair<ParallelDim, std::string>> dims = {
      {std::nullopt, "none"}, {0, "0"}, {1, "1"}, {-1, "-1"}};
  for (const auto& [dim, name] : dims) {
    for (const auto& [in, out] : kSizes) {
      for (const bool bias : {true, false}) {
        const std::string text = "tessera::ParallelLinear(in_features=" + std::to_string(in) +
                                 ", out_features=" + std::to_string(out) + ", bias=" + (bias ? "true" : "false") +
                                 ", dim=" + name + ", allow_uneven=true)";
        const std::function<ParallelLinear()> make = [&, in = in, out = out, dim = dim] {
          ParallelLinear layer(in, out, mesh, ParallelDimOptions{.bias = bias, .dim = dim, .allow_uneven = true});
          layer->to(at::kDouble);
          return layer;
        };
        check_module<ParallelLinear>(mesh, text, make, sample({5, in}));
      }
    }
    const std::function<RegisterParallelDim()> tag = [&, dim = dim] { return RegisterParallelDim(dim, mesh); };
    check_module<RegisterParallelDim>(mesh, "tessera::RegisterParallelDim(dim=" + name + ")", tag, sample({4, 3}));
    check_module<RegisterParallelDim>(mesh, "tessera::RegisterParallelDim(dim=" + name + ")", tag,
                                      register_parallel_dim(sample({4, 3}), dim, mesh));
  }
  CHECK_THROWS_WITH_AS(RegisterParallelDim(0, mesh)->forward(spread(sample({4, 3}), mesh, {Replicate()})),
                       doctest::Contains("redistribute it"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(RegisterParallelDim(2, mesh)->forward(sample({4, 3})),
                       doctest::Contains("dim 2 of a tensor of 2 dimensions"), std::invalid_argument);
  const at::Tensor logits = sample({6, 7}), target = at::remainder(at::arange(6) * 5, 7);
  for (const bool weighted : {false, true}) {
    const ParallelCrossEntropyOptions options{.weight = weighted ? at::rsub(sample({7}, 2), 1.5) : at::Tensor(),
                                              .ignore_index = 3,
                                              .reduction = at::Reduction::Sum};
    const auto make = [&] { return ParallelCrossEntropyLoss(options); };
    const std::string text = "tessera::ParallelCrossEntropyLoss(ignore_index=3, reduction=sum)";
    check_module<ParallelCrossEntropyLoss>(mesh, text, make, leaf(logits), target);
    check_module<ParallelCrossEntropyLoss>(mesh, text, make, leaf(spread(logits, mesh, {Shard(1)})), target);
    ParallelCrossEntropyLoss loss = make();
    const auto copy = std::dynamic_pointer_cast<ParallelCrossEntropyLossImpl>(loss->clone());
    CHECK(loss->named_buffers().size() == (weighted ? 1 : 0));
    if (!weighted) continue;
    copy->weight.zero_();
    CHECK(close(loss->weight, options.weight));
    CHECK(copy->forward(logits, target).item<double>() == 0);
    loss->to(at::kFloat);
    CHECK(close(loss->forward(logits.to(at::kFloat), target).to(at::kDouble), make()->forward(logits, target), 1e-6));
  }
}

TESSERA_RANKS_TEST_CASE("a stack of named layers in one Sequential equals one process, and so does its clone",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ParallelEmbeddingOptions table(10, 6);
  table.allow_uneven = true;
  table.config = doubles();
  ColumnParallelOptions up(6, 9);
  up.allow_uneven = true;
  up.config = doubles();
  RowParallelOptions down(9, 7);
  down.allow_uneven = true;
  down.input_is_parallel = true;
  down.config = doubles();
  ParallelLinear head(7, 5, mesh, ParallelDimOptions{.dim = 1, .allow_uneven = true});
  head->to(at::kDouble);
  torch::nn::Sequential model(ParallelEmbedding(table, mesh), ColumnParallelLinear(up, mesh), torch::nn::Tanh(),
                              RowParallelLinear(down, mesh), RegisterParallelDim(std::nullopt, mesh), head);
  stir(*model, false);
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  const at::Tensor ids = at::remainder(at::arange(8) * 3, 10), g = sample({8, 5}, 9);
  for (torch::nn::SequentialImpl* const each : {model.get(), copy.get()}) {
    std::vector<at::Tensor> p;
    for (const at::Tensor& parameter : each->parameters()) p.push_back(leaf(full_tensor(parameter.detach())));
    REQUIRE(p.size() == 7);
    const at::Tensor hidden = at::tanh(at::linear(at::embedding(p[0], ids), p[1], p[2]));
    const at::Tensor want = at::linear(at::linear(hidden, p[3], p[4]), p[5], p[6]);
    const at::Tensor got = each->forward(ids);
    CHECK(close(full_tensor(got.detach()), want.detach()));
    want.backward(g);
    got.backward(spread(g, mesh, placements_of(got)));
    std::size_t i = 0;
    for (const at::Tensor& parameter : each->parameters()) CHECK(close(full_tensor(parameter.grad()), p[i++].grad()));
  }
}

namespace {

// Checks a `weight` [10, 6] in two layers, a table of ids and a head of 10 features, against one process. `head` is
// given x [*, 6].
template <class Head>
void check_tied(Head& head, const at::Tensor& weight, const DeviceMesh& mesh, bool with_bias) {
  head.weight = weight;
  const at::Tensor x = sample({4, 6}), g = sample({4, 10}, 3);
  const at::Tensor mine = leaf(x), whole = leaf(x), dense = leaf(full_tensor(weight.detach()));
  const at::Tensor bias = with_bias ? full_tensor(head.bias.detach()) : at::Tensor();
  const at::Tensor want = at::linear(whole, dense, with_bias ? std::make_optional(bias) : std::nullopt);
  want.backward(g);
  weight.mutable_grad() = at::Tensor();
  const auto copy = std::dynamic_pointer_cast<Head>(head.clone());
  const at::Tensor got = head.forward(mine);
  CHECK(close(whole_of(got), want.detach()));
  got.backward(is_dtensor(got) ? spread(g, mesh, placements_of(got)) : g);
  CHECK(close(mine.grad(), whole.grad()));
  CHECK(close(full_tensor(weight.grad()), dense.grad()));
  // A copy computes what the layer computes, with values of its own.
  const at::Tensor copied = copy->forward(x);
  CHECK(close(whole_of(copied), want.detach()));
  CHECK_FALSE(copy->weight.is_same(weight));
  CHECK(copy->named_parameters()["weight"].is_same(copy->weight));
  copied.pow(2).sum().backward();
  CHECK(copy->weight.grad().defined());
  CHECK(close(full_tensor(weight.grad()), dense.grad()));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("a weight assigned to a layer is the one that it uses, however it lies", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const Placement& lies : {Shard(0), Shard(1), Replicate()}) {
    CAPTURE(to_string(lies));
    const at::Tensor weight = leaf(spread(sample({10, 6}, 7), mesh, {lies}));
    for (const ParallelDim dim : std::vector<ParallelDim>{std::nullopt, 0, 1, -1}) {
      CAPTURE(dim.value_or(-2));
      ParallelLinear head(6, 10, mesh, ParallelDimOptions{.dim = dim, .allow_uneven = true});
      head->to(at::kDouble);
      check_tied(*head, weight, mesh, true);
      ParallelEmbeddingOptions options(10, 6);
      options.allow_uneven = true;
      options.config = doubles();
      ParallelEmbedding table = parallel_embedding_layer(options, dim, mesh);
      table->weight = weight;
      const at::Tensor ids = at::remainder(at::arange(12) * 7, 10);
      CHECK(close(table->forward(ids).detach(), at::embedding(full_tensor(weight.detach()), ids)));
      const auto copy = std::dynamic_pointer_cast<ParallelEmbeddingImpl>(table->clone());
      CHECK(close(copy->forward(ids).detach(), at::embedding(full_tensor(weight.detach()), ids)));
    }
    for (const bool skip : {false, true}) {
      ColumnParallelOptions columns(6, 10);
      columns.gather_output = true;
      columns.allow_uneven = true;
      columns.config = doubles();
      columns.skip_weight_param_allocation = skip;
      ColumnParallelLinear column(columns, mesh);
      column->weight = weight;
      const auto copy = std::dynamic_pointer_cast<ColumnParallelLinearImpl>(column->clone());
      CHECK(copy->named_parameters().contains("weight") != skip);
      CHECK_FALSE(copy->weight.is_same(weight));
      CHECK(alike(copy->forward(sample({4, 6})), column->forward(sample({4, 6}))));
      if (!skip) check_tied(*column, weight, mesh, true);
    }
    RowParallelOptions rows(6, 10);
    rows.allow_uneven = true;
    rows.bias = false;
    rows.config = doubles();
    check_tied(*RowParallelLinear(rows, mesh), weight, mesh, false);
  }
}

TESSERA_RANKS_TEST_CASE("a table and a head of one weight train as in one process", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor ids = at::remainder(at::arange(6) * 7, 10), g = sample({6, 10}, 4);
  for (const ParallelDim of_table : std::vector<ParallelDim>{std::nullopt, 0, 1}) {
    for (const ParallelDim of_head : std::vector<ParallelDim>{std::nullopt, 0, 1}) {
      ParallelEmbeddingOptions options(10, 6);
      options.allow_uneven = true;
      options.config = doubles();
      ParallelEmbedding table = parallel_embedding_layer(options, of_table, mesh);
      ParallelLinear head(6, 10, mesh, ParallelDimOptions{.bias = false, .dim = of_head, .allow_uneven = true});
      head->weight = table->weight;
      const at::Tensor dense = leaf(table->master_weight());
      torch::optim::SGD here({table->weight}, 0.25), there({dense}, 0.25);
      for (int step = 0; step < 2; ++step) {
        const at::Tensor got = head->forward(table->forward(ids)), want = at::linear(at::embedding(dense, ids), dense);
        CHECK(close(full_tensor(got.detach()), want.detach()));
        here.zero_grad();
        there.zero_grad();
        got.backward(spread(g, mesh, placements_of(got)));
        want.backward(g);
        here.step();
        there.step();
        CHECK(close(full_tensor(table->weight.detach()), dense.detach()));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("assigned biases and pieces, and tensors that do not fit", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 6}), w = sample({10, 6}, 2), b = sample({10}, 3), want = at::linear(x, w, b);
  for (const ParallelDim dim : std::vector<ParallelDim>{std::nullopt, 0, 1}) {
    ParallelLinear layer(6, 10, mesh, ParallelDimOptions{.dim = dim, .allow_uneven = true});
    const Placement cut = dim ? Shard(*dim == 0 ? 1 : 0) : Replicate(),
                    of_bias = dim == ParallelDim(1) ? Shard(0) : Replicate();
    layer->weight = piece_of(w, mesh, {cut});
    for (const Placement& lies : {Shard(0), Replicate()}) {
      layer->bias = spread(b, mesh, {lies});
      CHECK(close(full_tensor(layer->forward(x)), want));
    }
    layer->bias = piece_of(b, mesh, {of_bias});
    CHECK(close(full_tensor(layer->forward(x)), want));
    layer->weight = spread(sample({9, 6}), mesh, {Replicate()});
    CHECK_THROWS_WITH_AS(layer->forward(x), doctest::Contains("ParallelLinear: supplied weight is Double [9, 6]"),
                         std::invalid_argument);
    const DeviceMesh plane = mesh_over({1, mesh.size()});
    layer->weight = spread(w, plane, {Replicate(), Replicate()});
    CHECK_THROWS_WITH_AS(layer->forward(x), doctest::Contains("as expected"), std::invalid_argument);
  }
  RowParallelOptions rows(6, 10);
  rows.allow_uneven = true;
  rows.config = doubles();
  for (const bool skip : {false, true}) {
    rows.skip_bias_add = skip;
    RowParallelLinear row(rows, mesh);
    row->weight = piece_of(w, mesh, {Shard(1)});
    row->bias = spread(b, mesh, {Shard(0)});
    for (const bool global : {false, true}) {
      const LinearOutput out = row->forward_with_bias(global ? spread(x, mesh, {Shard(0)}) : x);
      CHECK(close(whole_of(skip ? out.output + out.bias : out.output), want));
    }
  }
  for (const bool gather : {false, true}) {
    ColumnParallelOptions columns(6, 10);
    columns.gather_output = gather;
    columns.allow_uneven = true;
    columns.skip_bias_add = true;
    columns.config = doubles();
    ColumnParallelLinear column(columns, mesh);
    column->weight = spread(w, mesh, {Replicate()});
    column->bias = spread(b, mesh, {Replicate()});
    for (const bool global : {false, true}) {
      const LinearOutput out = column->forward_with_bias(global ? spread(x, mesh, {Shard(0)}) : x);
      const at::Tensor sum = out.output + out.bias;
      CHECK(close(global ? full_tensor(sum) : sum, global || gather ? want : piece_of(want, mesh, {Shard(1)})));
    }
  }
  if (mesh.size() == 1) return;
  ParallelEmbeddingOptions options(10, 6);
  options.allow_uneven = true;
  options.max_norm = 1;
  options.config = doubles();
  ParallelEmbedding table(options, mesh);
  table->weight = spread(w, mesh, {Shard(0)});
  CHECK_THROWS_WITH_AS(table->forward(at::arange(4)), doctest::Contains("max_norm writes the table"),
                       std::invalid_argument);
}

TEST_CASE("one_rank_errors: a plain weight or input of other sizes fails the job") {
  const auto fails = [](const std::string& part, const std::function<void(const DeviceMesh&, bool)>& body) {
    for (const std::string& text : thrown(body)) {
      CAPTURE(text);
      CHECK(text.find(part) != std::string::npos);
    }
  };
  fails("supplied weight's shape is [5, 3], not [4, 3] as expected", [](const DeviceMesh& mesh, bool odd) {
    ParallelLinear layer(6, 4, mesh, ParallelDimOptions{.dim = 0});
    layer->weight = at::ones({odd ? 5 : 4, 3});
    full_tensor(layer->forward(at::ones({2, 6})));
  });
  fails("input [2, 4]; it has 6 features in its last dimension, or this rank's part of them",
        [](const DeviceMesh& mesh, bool odd) {
          full_tensor(ParallelLinear(6, 4, mesh, ParallelDimOptions{.dim = 0})->forward(at::ones({2, odd ? 4 : 6})));
        });
  fails("supplied weight's shape is [3, 6], not [2, 6] as expected", [](const DeviceMesh& mesh, bool odd) {
    ParallelEmbeddingOptions options(4, 6);
    options.cut = EmbeddingCut::kVocabulary;
    ParallelEmbedding layer(options, mesh);
    layer->weight = at::ones({odd ? 3 : 2, 6});
    layer->forward(at::arange(4));
  });
}

TESSERA_RANKS_TEST_CASE("ParallelLinear by rows takes this rank's features as a plain input, or the whole",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const auto& [in, out] : std::vector<std::pair<int64_t, int64_t>>{{12, 24}, {7, 5}, {2, 3}}) {
    CAPTURE(in);
    ParallelLinear layer(in, out, mesh, ParallelDimOptions{.dim = 0, .allow_uneven = true});
    layer->to(at::kDouble);
    const at::Tensor weight = leaf(full_tensor(layer->weight.detach())), bias = leaf(full_tensor(layer->bias.detach()));
    const at::Tensor whole = leaf(sample({5, 3, in})), g = sample({5, 3, out}, 2),
                     want = at::linear(whole, weight, bias);
    want.backward(g);
    const at::Tensor piece = leaf(piece_of(whole.detach(), mesh, {Shard(2)}));
    CommCounter counter(mesh);
    const at::Tensor got = layer->forward(piece);
    CHECK(counter.total() == (mesh.size() > 1 ? 1 : 0));
    CHECK(placements_of(got) == Placements{Replicate()});
    CHECK(close(full_tensor(got.detach()), want.detach()));
    counter.reset();
    got.backward(spread(g, mesh, {Replicate()}));
    CHECK(counter.total() == 0);
    CHECK(close(piece.grad(), piece_of(whole.grad(), mesh, {Shard(2)})));
    CHECK(close(full_tensor(layer->weight.grad()), weight.grad()));
    CHECK(close(full_tensor(layer->bias.grad()), bias.grad()));
  }
  // As TorchShard stacks them: columns, then rows of the first layer's output, marked or plain.
  ParallelLinear up(6, 9, mesh, ParallelDimOptions{.dim = -1, .allow_uneven = true});
  ParallelLinear down(9, 4, mesh, ParallelDimOptions{.dim = 0, .allow_uneven = true});
  const at::Tensor x = sample({5, 6}, 1, at::kFloat), hidden = up->forward(x);
  CHECK(alike(down->forward(to_local(hidden)), down->forward(hidden)));
}

TESSERA_RANKS_TEST_CASE("parallel_embedding_layer takes the caller's init_method, and its own where there is none",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const ParallelDim dim : std::vector<ParallelDim>{std::nullopt, 0, 1}) {
    ParallelEmbeddingOptions options(12, 6);
    options.padding_idx = 3;
    options.init_method = init_method(InitType::kOnes);
    at::Tensor want = at::ones({12, 6});
    want[3].zero_();
    CHECK(same(parallel_embedding_layer(options, dim, mesh)->master_weight(), want));
    options.init_method = nullptr;
    const at::Tensor normal = parallel_embedding_layer(options, dim, mesh)->master_weight();
    CHECK(normal.abs().max().item<float>() > 1.2F);  // xavier's deviation would be a third of that
  }
}

TESSERA_RANKS_TEST_CASE("a clone has no main_grad, without which it does not train", {1, 2}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions columns(4, 8);
  columns.config = doubles();
  columns.config.gradient_accumulation_fusion = true;
  ColumnParallelLinear layer(columns, mesh);
  layer->main_grad = at::zeros_like(to_local(layer->weight.detach()));
  const auto copy = std::dynamic_pointer_cast<ColumnParallelLinearImpl>(layer->clone());
  CHECK_FALSE(copy->main_grad.defined());
  copy->main_grad = at::zeros_like(layer->main_grad);
  copy->forward(sample({3, 4})).sum().backward();
  CHECK(layer->main_grad.abs().sum().item<double>() == 0);
  CHECK(copy->main_grad.abs().sum().item<double>() > 0);
}

namespace {

struct PairImpl : torch::nn::Cloneable<PairImpl> {
  PairImpl() { reset(); }
  void reset() override {
    up = register_module("up", torch::nn::Linear(10, 16));
    down = register_module("down", torch::nn::Linear(16, 12));
    this->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::relu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Pair);

struct HookedLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
};
TESSERA_MODULE(HookedLinear);

}  // namespace

TESSERA_RANKS_TEST_CASE("a module of a pairwise style in containers, printed and cloned", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({8, 10});
  Pair pair;
  {
    const c10::AutoGradMode none(false);
    for (const at::Tensor& each : pair->parameters()) at::Tensor(each).copy_(sample(each.sizes(), each.numel()));
  }
  const at::Tensor want = pair->forward(x).detach();
  parallelize_module(pair, mesh, PairwiseParallel());
  const at::Tensor direct = pair->forward(x);
  CHECK(close(whole_of(direct), want));
  torch::nn::AnyModule any(pair);
  CHECK(alike(any.forward(x), direct));
  torch::nn::Sequential sequence(pair);
  CHECK(alike(sequence->forward(x), direct));
  const auto copy = std::dynamic_pointer_cast<Hooked<PairImpl>>(clone_module(*pair));
  REQUIRE(copy != nullptr);
  check_copy(*pair, *copy, x);
  const auto copied = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(clone_module(*sequence));
  CHECK(alike(copied->forward(x), direct));
  CHECK(printed(*pair) == c10::demangle(typeid(PairImpl).name()) +
                              "(\n  (up): torch::nn::Linear(in_features=10, out_features=16, bias=true)\n"
                              "  (down): torch::nn::Linear(in_features=16, out_features=12, bias=true)\n)");
  CHECK(printed(*HookedLinear(3, 4)) == printed(*torch::nn::Linear(3, 4)));
}

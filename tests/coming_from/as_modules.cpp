// Uses every named layer as a module of LibTorch: in Sequential and AnyModule, printed, and cloned.

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
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
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/dtensor/whole_value.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

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

// The ways in which a layer is used as a module of LibTorch.
enum class Use { kContained, kPrinted, kCloned };

// Holds a subcase for each of them, in which `body` checks it alone.
void for_each_use(const std::function<void(Use)>& body) {
  SUBCASE("in torch::nn::Sequential and AnyModule") { body(Use::kContained); }
  SUBCASE("printed") { body(Use::kPrinted); }
  SUBCASE("cloned") { body(Use::kCloned); }
}

template <class Holder, class... Inputs>
void check_contained(Holder& layer, const Inputs&... inputs) {
  const at::Tensor direct = layer->forward(inputs...);
  torch::nn::AnyModule any(layer);
  CHECK(alike(any.forward(inputs...), direct));
  torch::nn::Sequential sequence(layer);
  CHECK(alike(sequence->forward(inputs...), direct));
}

template <class Holder>
void check_printed(Holder& layer, const std::string& text) {
  CHECK(printed(*layer) == text);
  CHECK(printed(*torch::nn::Sequential(layer)) == "torch::nn::Sequential(\n  (0): " + text + "\n)");
}

// Clones the layer itself, in containers and in a user's module; `freeze` is as in stir().
template <class Holder, class... Inputs>
void check_cloned(const DeviceMesh& mesh, Holder& layer, const std::function<Holder()>& make, bool freeze,
                  const Inputs&... inputs) {
  using Impl = typename Holder::ContainedType;
  manual_seed(11, mesh.world());
  const at::Tensor drawn = tessera::rand({4}, mesh, {Replicate()});
  manual_seed(11, mesh.world());
  const CommCounter counter(mesh);
  const auto copy = std::dynamic_pointer_cast<Impl>(layer->clone());
  REQUIRE(copy != nullptr);
  CHECK(counter.total() == 0);
  CHECK(alike(tessera::rand({4}, mesh, {Replicate()}), drawn));
  check_copy(*layer, *copy, inputs...);
  const auto in_sequence = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(torch::nn::Sequential(layer)->clone());
  check_copy(*layer, *in_sequence->ptr<Impl>(0), inputs...);
  check_copy(*layer, *std::dynamic_pointer_cast<Impl>(torch::nn::AnyModule(layer).clone().ptr()), inputs...);

  AroundImpl<Holder> around(make);
  stir(around, freeze);
  const auto copied = std::dynamic_pointer_cast<AroundImpl<Holder>>(tessera::clone_module(around));
  check_copy(*around.inner, *copied->inner, inputs...);
}

template <class Holder, class... Inputs>
void check_module(Use use, const DeviceMesh& mesh, const std::string& text, const std::function<Holder()>& make,
                  const Inputs&... inputs) {
  CAPTURE(text);
  for (const bool freeze : {false, true}) {
    CAPTURE(freeze);
    Holder layer = make();
    stir(*layer, freeze);
    if (use == Use::kContained) check_contained(layer, inputs...);
    if (use == Use::kPrinted) check_printed(layer, text);
    if (use == Use::kCloned) check_cloned(mesh, layer, make, freeze, inputs...);
  }
}

const std::vector<std::pair<int64_t, int64_t>> kSizes = {{12, 24}, {7, 5}, {1, 1}};

ParallelCrossEntropyOptions loss_options(bool weighted) {
  return {.weight = weighted ? at::rsub(sample({7}, 2), 1.5) : at::Tensor(),
          .ignore_index = 3,
          .reduction = at::Reduction::Sum};
}

std::string head_of(const char* name, int64_t in, int64_t out) {
  return "tessera::" + std::string(name) + "(input_size=" + std::to_string(in) + ", output_size=" + std::to_string(out);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("ColumnParallelLinear as a module", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for_each_use([&](Use use) {
    for (const auto& [in, out] : kSizes) {
      const at::Tensor x = sample({5, in});
      for (const bool gather : {false, true}) {
        ColumnParallelOptions options(in, out);
        options.gather_output = gather;
        options.allow_uneven = true;
        options.config = in_double();
        const std::string head = head_of("ColumnParallelLinear", in, out);
        const std::string gathers = std::string(", gather_output=") + (gather ? "true" : "false");
        const std::string rest = ", allow_uneven=true, params_dtype=Double)";
        const auto make = [&] { return ColumnParallelLinear(options, mesh); };
        check_module<ColumnParallelLinear>(use, mesh, head + ", bias=true" + gathers + rest, make, x);
        check_module<ColumnParallelLinear>(use, mesh, head + ", bias=true" + gathers + rest, make,
                                           spread(x, mesh, {Replicate()}));
        options.bias = false;
        options.lora_rank = 2;
        check_module<ColumnParallelLinear>(
            use, mesh, head + ", bias=false" + gathers + ", allow_uneven=true, lora_rank=2, params_dtype=Double)", make,
            x);
      }
    }
    ColumnParallelOptions options(12, 24);
    options.config = in_double();
    options.config.sequence_parallel = true;
    options.stride = 2;
    check_module<ColumnParallelLinear>(
        use, mesh,
        head_of("ColumnParallelLinear", 12, 24) +
            ", bias=true, gather_output=false, stride=2, params_dtype=Double, "
            "sequence_parallel=true)",
        [&] { return ColumnParallelLinear(options, mesh); }, sample({2, 12}));
  });
}

TESSERA_RANKS_TEST_CASE("RowParallelLinear as a module", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for_each_use([&](Use use) {
    for (const auto& [in, out] : kSizes) {
      const at::Tensor x = sample({5, in});
      RowParallelOptions options(in, out);
      options.allow_uneven = true;
      options.config = in_double();
      const std::string head = head_of("RowParallelLinear", in, out);
      const std::string rest = ", allow_uneven=true, params_dtype=Double)";
      const auto make = [&] { return RowParallelLinear(options, mesh); };
      check_module<RowParallelLinear>(use, mesh, head + ", bias=true, input_is_parallel=false" + rest, make, x);
      check_module<RowParallelLinear>(use, mesh, head + ", bias=true, input_is_parallel=false" + rest, make,
                                      spread(x, mesh, {Shard(1)}));
      options.input_is_parallel = true;
      options.lora_rank = 3;
      check_module<RowParallelLinear>(
          use, mesh, head + ", bias=true, input_is_parallel=true, allow_uneven=true, lora_rank=3, params_dtype=Double)",
          make, piece_of(x, mesh, {Shard(1)}));
    }
  });
}

TESSERA_RANKS_TEST_CASE("ParallelEmbedding as a module", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for_each_use([&](Use use) {
    const at::Tensor ids = at::remainder(at::arange(15) * 5, 7).view({5, 3});
    const std::vector<std::pair<EmbeddingCut, std::string>> cuts = {
        {EmbeddingCut::kVocabulary, "vocabulary"}, {EmbeddingCut::kWidth, "width"}, {EmbeddingCut::kNone, "none"}};
    for (const auto& [cut, name] : cuts) {
      for (const int64_t width : {5, 1}) {
        ParallelEmbeddingOptions options(7, width);
        options.cut = cut;
        options.padding_idx = -2;
        options.allow_uneven = true;
        options.config = in_double();
        const std::string text = "tessera::ParallelEmbedding(num_embeddings=7, embedding_dim=" + std::to_string(width) +
                                 ", cut=" + name + ", padding_idx=5, allow_uneven=true, params_dtype=Double)";
        const auto make = [&] { return ParallelEmbedding(options, mesh); };
        check_module<ParallelEmbedding>(use, mesh, text, make, ids);
        check_module<ParallelEmbedding>(use, mesh, text, make, spread(ids, mesh, {Shard(0)}));
      }
    }
  });
}

TESSERA_RANKS_TEST_CASE("layers of Megatron's defaults print no option that has its default", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  CHECK(printed(*ColumnParallelLinear(ColumnParallelOptions::megatron(3, 12), mesh)) ==
        "tessera::ColumnParallelLinear(input_size=3, output_size=12, bias=true, gather_output=false)");
  CHECK(printed(*vocab_parallel_embedding(12, 6, mesh, init_method(InitType::kNormal))) ==
        "tessera::ParallelEmbedding(num_embeddings=12, embedding_dim=6, cut=vocabulary)");
}

TESSERA_RANKS_TEST_CASE("ParallelLinear, the loss and RegisterParallelDim as modules", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for_each_use([&](Use use) {
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
          check_module<ParallelLinear>(use, mesh, text, make, sample({5, in}));
        }
      }
      const std::function<RegisterParallelDim()> tag = [&, dim = dim] { return RegisterParallelDim(dim, mesh); };
      check_module<RegisterParallelDim>(use, mesh, "tessera::RegisterParallelDim(dim=" + name + ")", tag,
                                        sample({4, 3}));
      check_module<RegisterParallelDim>(use, mesh, "tessera::RegisterParallelDim(dim=" + name + ")", tag,
                                        register_parallel_dim(sample({4, 3}), dim, mesh));
    }
    const at::Tensor logits = sample({6, 7}), target = at::remainder(at::arange(6) * 5, 7);
    for (const bool weighted : {false, true}) {
      const auto make = [&] { return ParallelCrossEntropyLoss(loss_options(weighted)); };
      const std::string text = "tessera::ParallelCrossEntropyLoss(ignore_index=3, reduction=sum)";
      check_module<ParallelCrossEntropyLoss>(use, mesh, text, make, leaf(logits), target);
      check_module<ParallelCrossEntropyLoss>(use, mesh, text, make, leaf(spread(logits, mesh, {Shard(1)})), target);
    }
  });
}

TESSERA_RANKS_TEST_CASE("RegisterParallelDim refuses a tensor of another layout, and a dim that there is not",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  check_refused(
      [&] {
        RegisterParallelDim(0, mesh)->forward(spread(sample({4, 3}), mesh, {Replicate()}));
      },
      "redistribute it");
  check_refused([&] { RegisterParallelDim(2, mesh)->forward(sample({4, 3})); }, "dim 2 of a tensor of 2 dimensions");
}

TEST_CASE("the loss's weight is a buffer, which a copy has to itself and another dtype converts") {
  const at::Tensor logits = sample({6, 7}), target = at::remainder(at::arange(6) * 5, 7);
  CHECK(ParallelCrossEntropyLoss(loss_options(/*weighted=*/false))->named_buffers().is_empty());
  const ParallelCrossEntropyOptions options = loss_options(/*weighted=*/true);
  ParallelCrossEntropyLoss loss(options);
  CHECK(loss->named_buffers().size() == 1);
  const auto copy = std::dynamic_pointer_cast<ParallelCrossEntropyLossImpl>(loss->clone());
  copy->weight.zero_();
  CHECK(close(loss->weight, options.weight));
  CHECK(copy->forward(logits, target).item<double>() == 0);
  const at::Tensor want = loss->forward(logits, target);
  loss->to(at::kFloat);
  CHECK(close(loss->forward(logits.to(at::kFloat), target).to(at::kDouble), want, 1e-6));
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
  CHECK(close(whole_value(direct), want));
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

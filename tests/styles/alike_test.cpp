// Ranks give parallelize_module different modules or plans: all of them throw one error, nothing is converted, and the
// job goes on.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/ops/ones.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/activation.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::Linear;

Mlp small_mlp(int64_t hidden = 8, bool bias = true) {
  Mlp mlp(4, hidden, 4, bias);
  mlp->to(device());
  return mlp;
}

struct Failing : ParallelStyle {
  void apply(ApplyContext&) const override {
    if (rank() == 1) throw std::runtime_error("out of ideas");
  }
  std::string name() const override { return "Failing"; }
};

// Returns the text that it throws; the module stays plain, and the mesh can be used again.
template <class Exception = std::invalid_argument>
std::string refusal(const DeviceMesh& mesh, Mlp module, const ParallelPlan& plan,
                    const ParallelizeOptions& options = {}) {
  std::string message = "(nothing was thrown)";
  try {
    parallelize_module(module, mesh, plan, options);
  } catch (const Exception& error) {
    message = error.what();
  }
  for (const at::Tensor& t : module->parameters()) CHECK_FALSE(is_dtensor(t));
  Mlp good = small_mlp();
  CHECK_NOTHROW(parallelize_module(good, mesh, {{"up", ColwiseParallel()}}));
  return message;
}

const std::string kDiffer =
    "parallelize_module: the ranks' modules or plans differ; every rank must give a module of the same";

}  // namespace

TESSERA_RANKS_TEST_CASE("ranks whose modules, plans or options differ: every rank gets the same error", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const bool other = rank() == 1;
  const ParallelPlan plan = {{"up", ColwiseParallel()}};
  CHECK(refusal(mesh, small_mlp(other ? 16 : 8), plan).find(kDiffer) == 0);     // shapes
  CHECK(refusal(mesh, small_mlp(8, /*bias=*/other), plan).find(kDiffer) == 0);  // tensors
  CHECK(refusal(mesh, small_mlp(), {{other ? "down" : "up", ColwiseParallel()}}).find(kDiffer) == 0);
  CHECK(refusal(mesh, small_mlp(), plan, {.src_rank = other ? 1 : 0}).find(kDiffer) == 0);
  Mlp half = small_mlp(), trained = small_mlp(), frozen = small_mlp();
  if (other) half->to(at::kBFloat16);
  CHECK(refusal(mesh, half, plan).find(kDiffer) == 0);
  if (other) trained->forward(at::ones({1, 4}, on(at::kFloat))).sum().backward();
  CHECK(refusal(mesh, trained, plan).find(kDiffer) == 0);
  if (other) frozen->up->weight.set_requires_grad(false);
  CHECK(refusal(mesh, frozen, plan).find(kDiffer) == 0);
  Mlp shared = small_mlp(4);
  if (other) shared->down->weight.set_data(shared->up->weight);  // one scatter fewer
  CHECK(refusal(mesh, shared, {}).find(kDiffer) == 0);
}

TESSERA_RANKS_TEST_CASE("ranks whose styles ask for other layouts, though modules and plans read alike", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  struct Cut : ParallelStyle {
    explicit Cut(int64_t along) : dim(along) {}
    void apply(ApplyContext& context) const override { context.place("weight", Shard(dim)); }
    std::string name() const override { return "Cut"; }
    int64_t dim;
  };
  struct Taken : ParallelStyle {
    explicit Taken(Placement layout) : input(std::move(layout)) {}
    void apply(ApplyContext& context) const override {
      context.contract("weight", {.operators = {"addmm"}, .input = input, .desired = Replicate(), .output = {}});
    }
    std::string name() const override { return "Taken"; }
    Placement input;
  };
  const bool other = rank() == 1;
  CHECK(refusal(mesh, small_mlp(), {{"up", Cut(other ? 1 : 0)}}).find(kDiffer) == 0);
  CHECK(refusal(mesh, small_mlp(), {{"up", Taken(other ? Shard(0) : Replicate())}}).find(kDiffer) == 0);
  torch::nn::MultiheadAttention attention(12, other ? 2 : 3);  // the same parameters
  attention->to(device());
  CHECK_THROWS_WITH_AS(parallelize_module(attention, mesh, ColwiseParallel()), doctest::Contains(kDiffer.c_str()),
                       std::invalid_argument);
  CHECK_FALSE(is_dtensor(attention->in_proj_weight));
}

TESSERA_RANKS_TEST_CASE("an error on one rank is thrown on all, with that rank's name", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const ParallelPlan wrong = {{rank() == 1 ? "upp" : "up", ColwiseParallel()}};
  CHECK(refusal(mesh, small_mlp(), wrong).find("rank 1: parallelize_module: the pattern 'upp' (ColwiseParallel)") == 0);
  CHECK(refusal<std::runtime_error>(mesh, small_mlp(), {{"up", Failing()}}) == "rank 1: out of ideas");
  struct Nameless : Failing {
    std::string to_string() const override {
      if (rank() == 1) throw std::runtime_error("no name");
      return "Nameless";
    }
    void apply(ApplyContext&) const override {}
  };
  CHECK(refusal<std::runtime_error>(mesh, small_mlp(), {{"up", Nameless()}}) == "rank 1: no name");
  // The same on all: no rank is named.
  CHECK(refusal(mesh, small_mlp(), {{"upp", ColwiseParallel()}}).find("parallelize_module: the pattern 'upp'") == 0);
}

TESSERA_RANKS_TEST_CASE("the agreement is one small all-reduce per mesh dimension, and none with kNoSource", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  Mlp module = small_mlp(), alone = small_mlp();
  CommCounter counter(mesh);
  parallelize_module(module, mesh, {{"up", ColwiseParallel()}});
  CHECK(counter.count("all_reduce") == 2);
  CHECK(counter.bytes("all_reduce") == 80);
  counter.reset();
  parallelize_module(alone, mesh, {{"up", ColwiseParallel()}}, {.src_rank = kNoSource});
  CHECK(counter.total() == 0);
}

TESSERA_RANKS_TEST_CASE("a rank outside the mesh plans for itself", {3}) {
  const DeviceMesh pair(world(), device().type(), Mesh({2}, {"tp"}));
  Mlp module = small_mlp(rank() == 2 ? 16 : 8);
  parallelize_module(module, pair, {{"up", ColwiseParallel()}});
  CHECK(is_dtensor(module->up->weight));
  CHECK(to_local(module->up->weight).numel() == (rank() == 2 ? 0 : 16));
}

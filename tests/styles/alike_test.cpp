// Ranks give parallelize_module different modules or plans: all of them throw one error, nothing is converted, and the
// job goes on.

#include <string>

#include <ATen/ops/ones.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::Linear;

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
  Mlp good(4, 8, 4);
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
  CHECK(refusal(mesh, Mlp(4, other ? 16 : 8, 4), plan).find(kDiffer) == 0);     // shapes
  CHECK(refusal(mesh, Mlp(4, 8, 4, /*bias=*/other), plan).find(kDiffer) == 0);  // tensors
  CHECK(refusal(mesh, Mlp(4, 8, 4), {{other ? "down" : "up", ColwiseParallel()}}).find(kDiffer) == 0);
  CHECK(refusal(mesh, Mlp(4, 8, 4), plan, {.src_rank = other ? 1 : 0}).find(kDiffer) == 0);
  Mlp half(4, 8, 4), trained(4, 8, 4), frozen(4, 8, 4);
  if (other) half->to(at::kBFloat16);
  CHECK(refusal(mesh, half, plan).find(kDiffer) == 0);
  if (other) trained->forward(at::ones({1, 4})).sum().backward();
  CHECK(refusal(mesh, trained, plan).find(kDiffer) == 0);
  if (other) frozen->up->weight.set_requires_grad(false);
  CHECK(refusal(mesh, frozen, plan).find(kDiffer) == 0);
  Mlp shared(4, 4, 4);
  if (other) shared->down->weight.set_data(shared->up->weight);  // one scatter fewer
  CHECK(refusal(mesh, shared, {}).find(kDiffer) == 0);
}

TESSERA_RANKS_TEST_CASE("an error on one rank is thrown on all, with that rank's name", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const ParallelPlan wrong = {{rank() == 1 ? "upp" : "up", ColwiseParallel()}};
  CHECK(refusal(mesh, Mlp(4, 8, 4), wrong).find("rank 1: parallelize_module: the pattern 'upp' (ColwiseParallel)") ==
        0);
  CHECK(refusal<std::runtime_error>(mesh, Mlp(4, 8, 4), {{"up", Failing()}}) == "rank 1: out of ideas");
  struct Nameless : Failing {
    std::string to_string() const override {
      if (rank() == 1) throw std::runtime_error("no name");
      return "Nameless";
    }
    void apply(ApplyContext&) const override {}
  };
  CHECK(refusal<std::runtime_error>(mesh, Mlp(4, 8, 4), {{"up", Nameless()}}) == "rank 1: no name");
  // The same on all: no rank is named.
  CHECK(refusal(mesh, Mlp(4, 8, 4), {{"upp", ColwiseParallel()}}).find("parallelize_module: the pattern 'upp'") == 0);
}

TESSERA_RANKS_TEST_CASE("the agreement is one small all-reduce per mesh dimension, and none with kNoSource", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  Mlp module(4, 8, 4), alone(4, 8, 4);
  CommCounter counter(mesh);
  parallelize_module(module, mesh, {{"up", ColwiseParallel()}});
  CHECK(counter.count("all_reduce") == 2);
  CHECK(counter.bytes("all_reduce") == 80);
  counter.reset();
  parallelize_module(alone, mesh, {{"up", ColwiseParallel()}}, {.src_rank = kNoSource});
  CHECK(counter.total() == 0);
}

TESSERA_RANKS_TEST_CASE("a rank outside the mesh plans for itself", {3}) {
  const DeviceMesh pair(world(), at::kCPU, Mesh({2}, {"tp"}));
  Mlp module(4, rank() == 2 ? 16 : 8, 4);
  parallelize_module(module, pair, {{"up", ColwiseParallel()}});
  CHECK(is_dtensor(module->up->weight));
  CHECK(to_local(module->up->weight).numel() == (rank() == 2 ? 0 : 16));
}

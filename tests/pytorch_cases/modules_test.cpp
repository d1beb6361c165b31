// Tests modules under styles: PyTorch's case 38, and what its users reported about modules whose ranks start
// differently.

#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace tessera::testing {
namespace {

const ParallelPlan kPlan = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};

// Makes equal values each time: the threads share the generator from which a module draws.
Mlp make_mlp() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Mlp mlp(5, 1024, 4);
  fill(*mlp);
  return mlp;
}

}  // namespace

TEST_CASE("38: an MLP of 5, 1024 and 4: one step of SGD under styles is that of one process") {
  on_lines([](const DeviceMesh& mesh) {
    Mlp want = make_mlp(), got = make_mlp();
    auto tp = parallelize_module(got, mesh, kPlan);
    const at::Tensor x = sample({20, 5});
    torch::optim::SGD ours(got->parameters(), torch::optim::SGDOptions(0.25));
    torch::optim::SGD theirs(want->parameters(), torch::optim::SGDOptions(0.25));
    CommCounter counter(mesh);
    at::Tensor y = tp(x);
    CHECK(counts(counter) == (mesh.size() == 1 ? "-" : "all_reduce 1"));
    CHECK(difference(y, want->forward(x)) <= 1e-12);
    counter.reset();
    y.mean().backward();
    CHECK(counts(counter) == "-");
    want->forward(x).mean().backward();
    check_parameters(*got, *want, /*gradients=*/true, 1e-12);
    counter.reset();
    ours.step();
    CHECK(counts(counter) == "-");
    theirs.step();
    check_parameters(*got, *want, /*gradients=*/false, 1e-12);
    CHECK(difference(tp(x), want->forward(x)) <= 1e-12);
  });
}

TEST_CASE(
    "38: the same MLP made without memory, in its pieces: it and one step of SGD are those of the model made "
    "directly") {
  on_lines([](const DeviceMesh& mesh) {
    const auto make = [&](const DeviceMesh& on, const ParallelPlan& plan) {
      manual_seed(38, on.world());
      std::optional<ShardedInit> init(std::in_place, on);
      Mlp mlp(5, 1024, 4);
      mlp->to(at::kDouble);
      CHECK_THROWS(mlp->up->weight.data_ptr<double>());
      init.reset();
      parallelize_module(mlp, on, plan);
      return mlp;
    };
    const Mlp whole = make(fake_mesh(0, {1}, {"tp"}), {});
    Mlp want = make_mlp();
    {
      const at::NoGradGuard no_grad;
      for (auto& item : want->named_parameters()) item.value().copy_(to_local(whole->named_parameters()[item.key()]));
    }
    auto direct = parallelize_module(want, mesh, kPlan);
    Mlp got = make(mesh, kPlan);
    const at::Tensor x = sample({20, 5});
    const ImplicitReplication guard;
    for (Mlp& each : std::vector<Mlp>{got, want}) {
      torch::optim::SGD optimizer(each->parameters(), torch::optim::SGDOptions(0.25));
      each->forward(x).mean().backward();
      optimizer.step();
    }
    for (const auto& item : want->named_parameters()) {
      CAPTURE(item.key());
      const at::Tensor ours = got->named_parameters()[item.key()];
      CHECK(placements_of(ours) == placements_of(item.value()));
      CHECK(same(to_local(ours.detach()), to_local(item.value().detach())));
    }
  });
}

TEST_CASE("#144359: ranks that start from different weights compute with those of one rank") {
  on_lines([](const DeviceMesh& mesh) {
    const int64_t source = mesh.size() - 1;
    Mlp want = make_mlp(), got = make_mlp();
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : got->parameters()) p.mul_(static_cast<double>(mesh.world().rank() + 1));
      for (at::Tensor& p : want->parameters()) p.mul_(static_cast<double>(source + 1));
    }
    auto tp = parallelize_module(got, mesh, kPlan, {.src_rank = source});
    CHECK(difference(tp(sample({6, 5})), want->forward(sample({6, 5}))) <= 1e-12);
    check_parameters(*got, *want, /*gradients=*/false, 0);
  });
}

}  // namespace tessera::testing

#include "tessera/dtensor/loss_scaler.h"

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/gradients.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using namespace testing;

// Has parameters on two meshes and one that is plain, and an optimizer for them.
struct Scaled {
  explicit Scaled(const std::vector<DeviceMesh>& meshes) {
    for (const DeviceMesh& mesh : meshes)
      all.add(numbers({7, 3}, 0.1), &mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Shard(0)));
    all.add(numbers({3}, 0.2));
    optimizer = std::make_unique<torch::optim::SGD>(all.ours, 1.0);
  }
  // Gives gradients of `scale`, and on this rank a bad number in the piece of parameter `index`.
  void give(double scale, std::optional<double> bad = std::nullopt, std::size_t index = 0) {
    for (std::size_t i = 0; i < all.ours.size(); ++i) {
      const at::Tensor& grad = all.ours[i].grad();
      const at::Tensor piece = is_dtensor(grad) ? to_local(grad) : grad;
      piece.fill_(scale);
      if (bad && i == index && piece.numel() > 0) piece.view({-1})[0] = *bad;
    }
  }
  bool has_values(double value) const {
    for (const at::Tensor& each : all.ours) {
      const at::Tensor piece = is_dtensor(each) ? to_local(each) : each;
      if (!piece.eq(value).all().item<bool>()) return false;
    }
    return true;
  }
  Parameters all;
  std::unique_ptr<torch::optim::SGD> optimizer;
};

TESSERA_RANKS_TEST_CASE("LossScaler: complex gradients, of which some ranks may have no element, are scaled back",
                        {1, 3}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {world()->size()}, {"tp"}, world());
  for (const double bad : {1.0, kNan}) {
    for (const bool conjugated : {false, true}) {
      const at::Tensor whole = torch::ones({2, 3}, on(torch::kComplexDouble));
      const at::Tensor parameter = distribute_tensor(whole, mesh, {Shard(0)}).requires_grad_();
      const at::Tensor gradient = distribute_tensor(whole * c10::complex<double>(8 * bad, 4), mesh, {Shard(0)});
      parameter.mutable_grad() = conjugated ? gradient.conj() : gradient;
      torch::optim::SGD optimizer({parameter}, 1.0);
      LossScaler scaler({.initial_scale = 4});
      CHECK(scaler.step(optimizer) == (bad == 1));
      if (bad != 1) continue;
      CHECK(full_tensor(parameter.grad()).resolve_conj().equal(whole * c10::complex<double>(2, conjugated ? -1 : 1)));
    }
  }
}

TESSERA_RANKS_TEST_CASE("LossScaler: a bad number on one rank leaves out the step on all ranks", {1, 2, 3, 4}) {
  const DeviceMesh mesh = grid();
  for (const std::vector<DeviceMesh>& meshes :
       {std::vector{mesh}, std::vector{mesh, mesh["tp"]}, world()->size() > 1 ? stages_apart() : std::vector{mesh}}) {
    for (const double bad : {kInf, -kInf, kNan}) {
      for (int64_t rank = 0; rank < world()->size(); ++rank) {
        Scaled job(meshes);
        LossScaler scaler({.initial_scale = 8, .growth_interval = 2});
        const bool is_bad = world()->rank() == rank;
        job.give(8, is_bad ? std::optional(bad) : std::nullopt, job.all.ours.size() - 1);
        CHECK_FALSE(scaler.step(*job.optimizer));
        scaler.update();
        CHECK(job.has_values(0));
        CHECK(scaler.state() == LossScalerState{4, 0});
        job.give(4);
        CHECK(scaler.step(*job.optimizer));
        scaler.update();
        CHECK(job.has_values(-1));
        CHECK(scaler.state() == LossScalerState{4, 1});
        job.give(4);
        scaler.unscale_(*job.optimizer);
        CHECK(scaler.step(*job.optimizer));
        scaler.update();
        CHECK(job.has_values(-2));
        CHECK(scaler.state() == LossScalerState{8, 0});
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("LossScaler: one all-reduce of four bytes per mesh dimension", {1, 2, 4}) {
  const DeviceMesh mesh = grid();
  Scaled job({mesh, mesh["tp"]});
  LossScaler scaler;
  job.give(1);
  const CommCounter counter(mesh);
  scaler.unscale_(*job.optimizer);
  const int64_t dims = (mesh.size(0) > 1) + (mesh.size(1) > 1);
  CHECK(counter.count_by_op("LossScaler") == dims);
  CHECK(counter.total() == dims);
  CHECK(counter.total_bytes() == 4 * dims);
}

TESSERA_RANKS_TEST_CASE("LossScaler: stages of a pipeline leave out a step together", {2, 4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, world()->size() / 2}, {"pp", "tp"}, world());
  for (int64_t rank = 0; rank < world()->size(); ++rank) {
    Scaled job({mesh["tp"]});
    LossScaler scaler({.stages = mesh["pp"]});
    job.give(65536, world()->rank() == rank ? std::optional(kInf) : std::nullopt);
    CHECK_FALSE(scaler.step(*job.optimizer));
    CHECK(job.has_values(0));
  }
}

TESSERA_RANKS_TEST_CASE("LossScaler: a scaled loss trains as one that is not scaled", {1, 2, 4}) {
  const DeviceMesh mesh = grid();
  const at::Tensor start = numbers({5, 3}, 0.3), x = numbers({4, 5}, 0.4);
  at::Tensor weight = distribute_tensor(start, mesh, {Replicate(), Shard(1)}).detach().requires_grad_();
  at::Tensor plain = start.clone().requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.1), plain_optimizer({plain}, 0.1);
  LossScaler scaler;
  const at::Tensor input = distribute_tensor(x, mesh, {Shard(0), Replicate()});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    plain_optimizer.zero_grad();
    const at::Tensor loss = torch::mm(input, weight).square().mean();
    scaler.scale(loss).backward();
    torch::mm(x, plain).square().mean().backward();
    CHECK(torch::allclose(full_tensor(weight.grad()), plain.grad() * 65536));
    CHECK(scaler.step(optimizer));
    scaler.update();
    plain_optimizer.step();
  }
  CHECK(torch::allclose(full_tensor(weight.detach()), plain, 1e-12, 1e-12));
}

TESSERA_RANKS_TEST_CASE("LossScaler: FusedAdamW steps as AdamW in one process, and not where a rank has a bad number",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = grid();
  const at::Tensor start = numbers({5, 3}, 0.3), x = numbers({4, 5}, 0.4);
  const at::Tensor weight = distribute_tensor(start, mesh, {Replicate(), Shard(1)}).detach().requires_grad_();
  const at::Tensor plain = start.clone().requires_grad_();
  FusedAdamW fused({weight}, {.lr = 0.05});
  torch::optim::AdamW reference({plain}, torch::optim::AdamWOptions(0.05));
  REQUIRE(fused.parameters().size() == 1);
  CHECK(fused.parameters()[0].is_same(weight));
  const at::Tensor input = distribute_tensor(x, mesh, {Shard(0), Replicate()});
  LossScaler scaler({.initial_scale = 1024});
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    const bool is_bad = step == 2;
    fused.zero_grad();
    reference.zero_grad();
    scaler.scale(torch::mm(input, weight).square().mean()).backward();
    if (is_bad && world()->rank() == world()->size() - 1) to_local(weight.grad()).fill_(kInf);
    if (step == 1) scaler.unscale_(fused);
    CHECK(scaler.step(fused) == !is_bad);
    CHECK_THROWS_WITH_AS(scaler.step(fused), doctest::Contains("step() was called for this optimizer"),
                         std::invalid_argument);
    scaler.update();
    CHECK(scaler.state().scale == (step < 2 ? 1024 : 512));
    if (!is_bad) {
      torch::mm(x, plain).square().mean().backward();
      reference.step();
    }
    const double limit = device().is_cpu() ? 1e-11 : 1e-6;
    CHECK(torch::allclose(full_tensor(weight.detach()), plain.detach(), limit, limit));
  }
}

TESSERA_RANKS_TEST_CASE("LossScaler: after any number of bad steps in a row a good one writes numbers", {1, 2}) {
  const DeviceMesh mesh = grid();
  Scaled job({mesh});
  LossScaler scaler;
  for (int i = 0; i < 200; ++i) {
    job.give(1, kNan);
    CHECK_FALSE(scaler.step(*job.optimizer));
    scaler.update();
  }
  CHECK(scaler.state() == LossScalerState{LossScaler::kMinScale, 0});
  job.give(LossScaler::kMinScale);
  CHECK(scaler.step(*job.optimizer));
  scaler.update();
  CHECK(job.has_values(-1));
  CHECK(scaler.state() == LossScalerState{LossScaler::kMinScale, 1});
}

TESSERA_RANKS_TEST_CASE("LossScaler: several optimizers step each on their own, and share the scale", {2}) {
  const DeviceMesh mesh = grid();
  Scaled good({mesh}), bad({mesh});
  LossScaler scaler({.initial_scale = 2});
  good.give(2);
  bad.give(2, world()->rank() == 1 ? std::optional(kNan) : std::nullopt);
  CHECK(scaler.step(*good.optimizer));
  CHECK_FALSE(scaler.step(*bad.optimizer));
  CHECK(good.has_values(-1));
  CHECK(bad.has_values(0));
  scaler.update();
  CHECK(scaler.state() == LossScalerState{1, 0});
}

TESSERA_RANKS_TEST_CASE("LossScaler: its state, and what it refuses", {1}) {
  LossScaler scaler({.growth_interval = 3}), other;
  Scaled job({});
  for (int i = 0; i < 2; ++i) {
    job.give(1);
    scaler.step(*job.optimizer);
    CHECK_THROWS_WITH_AS(scaler.step(*job.optimizer), doctest::Contains("step() was called for this optimizer"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(scaler.unscale_(*job.optimizer), doctest::Contains("were scaled back since the last update()"),
                         std::invalid_argument);
    scaler.update();
  }
  CHECK(scaler.state() == LossScalerState{65536, 2});
  CHECK_THROWS_WITH_AS(scaler.update(), doctest::Contains("update() comes after step()"), std::invalid_argument);
  other.set_state(scaler.state());
  CHECK(other.state() == LossScalerState{65536, 2});
  for (const LossScalerState& state :
       {LossScalerState{0, 0}, {kInf, 0}, {kNan, 0}, {1, -1}, {LossScaler::kMinScale / 2, 0}}) {
    CHECK_THROWS_WITH_AS(other.set_state(state), doctest::Contains("LossScaler: the state has the scale"),
                         std::invalid_argument);
  }
  other.set_state({std::ldexp(1.0, 127), 1999});  // twice that is infinite in float32
  other.step(*job.optimizer);
  other.update();
  CHECK(other.state() == LossScalerState{std::ldexp(1.0, 127), 0});
  const auto refused = [](LossScalerOptions options, const char* text) {
    CHECK_THROWS_WITH_AS(LossScaler(std::move(options)), doctest::Contains(text), std::invalid_argument);
  };
  refused({.initial_scale = 0}, "initial_scale is 0; it must be finite, and 2^-24 or more");
  refused({.initial_scale = kInf}, "initial_scale is inf; it must be finite");
  refused({.growth_factor = 1}, "growth_factor is 1; it must be more than 1");
  refused({.backoff_factor = 1}, "backoff_factor is 1; it must be between 0 and 1");
  refused({.growth_interval = 0}, "growth_interval is 0; it must be 1 or more");
  const at::Tensor half = torch::zeros({2}, on(torch::kHalf)).requires_grad_();
  half.mutable_grad() = torch::ones({2}, on(torch::kHalf));
  torch::optim::SGD optimizer({half}, 1.0);
  CHECK_THROWS_WITH_AS(LossScaler().step(optimizer), doctest::Contains("a gradient of [2] is float16"),
                       std::invalid_argument);
}

}  // namespace
}  // namespace tessera

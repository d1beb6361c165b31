// Tests clip_grad_norm_ and LossScaler against LibTorch's functions in one process.

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/over_meshes.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using testing::world;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

DeviceMesh line(int64_t size) { return init_device_mesh("cpu", {size}, {"tp"}, world()); }

// Returns the mesh {dp, tp}, with two data ranks where the number of ranks is even.
DeviceMesh grid() {
  const int64_t size = world()->size(), dp = size % 2 == 0 ? 2 : 1;
  return init_device_mesh("cpu", {dp, size / dp}, {"dp", "tp"}, world());
}

at::Tensor numbers(at::IntArrayRef shape, double seed) {
  return (torch::arange(c10::multiply_integers(shape), torch::kDouble) * 0.7 + seed).sin().mul(seed + 1).view(shape);
}

// Makes a parameter, plain or on a mesh, and its plain twin with the same gradient.
struct Parameters {
  std::vector<at::Tensor> ours, plain;

  void add(const at::Tensor& gradient, const DeviceMesh* mesh = nullptr, const Placements& placements = {},
           const std::optional<Placements>& of_gradient = std::nullopt) {
    plain.push_back(torch::zeros_like(gradient).requires_grad_());
    plain.back().mutable_grad() = gradient.clone();
    at::Tensor mine = torch::zeros_like(gradient);
    at::Tensor grad = gradient.clone();
    if (mesh != nullptr) {
      mine = distribute_tensor(mine, *mesh, placements, kNoSource);
      grad = distribute_tensor(grad, *mesh, of_gradient.value_or(placements), kNoSource);
    }
    ours.push_back(mine.detach().requires_grad_());
    ours.back().mutable_grad() = grad;
  }

  void check_gradients() const {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      const at::Tensor grad = ours[i].grad();
      const at::Tensor whole = is_dtensor(grad) ? full_tensor(grad) : grad;
      const double tolerance = grad.scalar_type() == at::kDouble  ? 1e-13
                               : grad.scalar_type() == at::kFloat ? 1e-6
                                                                  : 1e-2;
      CHECK(torch::allclose(whole, plain[i].grad(), tolerance, tolerance, /*equal_nan=*/true));
    }
  }
};

// Checks that every rank has the same bits.
void check_alike(double value) {
  const DeviceMesh mesh = line(world()->size());
  const at::Tensor all = all_gather(torch::tensor({value}, torch::kDouble).view(torch::kLong), mesh, 0);
  CHECK(all.eq(all[0]).all().item<bool>());
}

void check_norm(double got, double want, double tolerance = 1e-13) {
  check_alike(got);
  if (std::isfinite(want)) {
    CHECK(got == doctest::Approx(want).epsilon(tolerance));
  } else {
    CHECK(std::isnan(got) == std::isnan(want));
    CHECK(std::isinf(got) == std::isinf(want));
  }
}

// Adds gradients of every layout on one mesh, uneven and empty pieces among them.
void add_layouts(Parameters& all, const DeviceMesh& mesh) {
  const int64_t tp = mesh.size(mesh.ndim() - 1);
  const auto placements = [&](Placement last, Placement first = Replicate()) {
    return mesh.ndim() == 1 ? Placements{last} : Placements{first, last};
  };
  all.add(numbers({7, 3}, 0.1), &mesh, placements(Shard(0)));
  all.add(numbers({3, 5}, 0.2), &mesh, placements(Shard(1), Shard(0)));
  all.add(numbers({1, 2}, 0.3), &mesh, placements(Shard(0)));
  all.add(numbers({4}, 0.4), &mesh, placements(Replicate()));
  all.add(numbers({9}, 0.5), &mesh, placements(Replicate(), Shard(0)));
  std::vector<int64_t> ragged(static_cast<std::size_t>(tp), 0);
  ragged.back() = 6;
  all.add(numbers({6}, 0.6), &mesh, placements(RaggedShard(0, ragged)));
  all.add(numbers({8, 2}, 0.7), &mesh, placements(BlockCyclic(0, 1)));
  all.add(numbers({}, 0.8), &mesh, placements(Replicate()));
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: the norm and the gradients of one process, by one all-reduce per dimension",
                        {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : {line(world()->size()), grid()}) {
    for (const double norm_type : {2.0, 1.0, 3.5, kInf}) {
      for (const double max_norm : {0.5, 1e6, 0.0}) {
        CAPTURE(norm_type);
        CAPTURE(max_norm);
        Parameters all;
        add_layouts(all, mesh);
        all.add(numbers({3, 3}, 0.9));
        all.ours.push_back(torch::zeros({2}));  // without a gradient
        all.plain.push_back(torch::zeros({2}));
        const at::Tensor view = all.ours[0].grad().t();  // sees what is written
        const double want = torch::nn::utils::clip_grad_norm_(all.plain, max_norm, norm_type);
        const CommCounter counter(mesh);
        const double got = clip_grad_norm_(all.ours, max_norm, norm_type);
        const int64_t dims = (mesh.size(0) > 1) + (mesh.ndim() > 1 && mesh.size(1) > 1);
        CHECK(counter.total() == dims);
        CHECK(counter.count_by_op("clip_grad_norm_") == dims);
        CHECK(counter.total_bytes() <= dims * 32);
        all.ours.pop_back();
        all.plain.pop_back();
        check_norm(got, want);
        all.check_gradients();
        CHECK(torch::allclose(full_tensor(view), all.plain[0].grad().t(), 1e-13, 1e-13));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: what is replicated everywhere needs no collective", {1, 2, 4}) {
  const DeviceMesh mesh = grid();
  Parameters all;
  all.add(numbers({4, 2}, 0.1), &mesh, {Replicate(), Replicate()});
  all.add(numbers({5}, 0.2), &mesh, {Replicate(), Replicate()});
  const double want = torch::nn::utils::clip_grad_norm_(all.plain, 0.1);
  const CommCounter counter(mesh);
  const double got = clip_grad_norm_(all.ours, 0.1);
  CHECK(counter.total() == 0);
  check_norm(got, want);
  all.check_gradients();
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: pending gradients are reduced first, all together", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line(world()->size());
  Parameters all;
  all.add(numbers({7, 3}, 0.1), &mesh, {Shard(0)}, Placements{Partial()});
  all.add(numbers({5}, 0.2), &mesh, {Replicate()}, Placements{Partial()});
  all.add(numbers({6}, 0.3), &mesh, {Replicate()}, Placements{Partial(ReduceOp::kAvg)});
  const double want = torch::nn::utils::clip_grad_norm_(all.plain, 0.1);
  const double got = clip_grad_norm_(all.ours, 0.1);
  check_norm(got, want);
  CHECK(placements_of(all.ours[0].grad()) == Placements{Shard(0)});
  CHECK(placements_of(all.ours[1].grad()) == Placements{Replicate()});
  all.check_gradients();
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: several dtypes", {1, 3}) {
  const DeviceMesh mesh = line(world()->size());
  Parameters all;
  all.add(numbers({7, 3}, 0.1).to(torch::kFloat), &mesh, {Shard(0)});
  all.add(numbers({5}, 0.2).to(torch::kBFloat16), &mesh, {Shard(0)});
  all.add(numbers({5}, 0.3).to(torch::kHalf), &mesh, {Replicate()});
  all.add(numbers({4, 2}, 0.4), &mesh, {Shard(1)});
  all.add(torch::complex(numbers({4}, 0.5), numbers({4}, 0.6)), &mesh, {Shard(0)});
  double sum = 0;
  for (const at::Tensor& parameter : all.plain) {
    sum += parameter.grad()
               .to(parameter.is_complex() ? torch::kComplexDouble : torch::kDouble)
               .abs()
               .square()
               .sum()
               .item<double>();
  }
  const double want = std::sqrt(sum), got = clip_grad_norm_(all.ours, 0.25);
  check_norm(got, want);
  for (const at::Tensor& parameter : all.plain) parameter.mutable_grad() = parameter.grad() * (0.25 / (want + 1e-6));
  all.check_gradients();
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: a number that is not finite on one rank counts on all", {1, 2, 4}) {
  const DeviceMesh mesh = grid();
  for (const double bad : {kInf, -kInf, kNan}) {
    for (const double norm_type : {2.0, kInf}) {
      CAPTURE(bad);
      CAPTURE(norm_type);
      Parameters all;
      add_layouts(all, mesh);
      const at::Tensor gradient = numbers({7, 3}, 0.9);
      gradient[6][2] = bad;
      all.add(gradient, &mesh, {Replicate(), Shard(0)});
      const at::Tensor before = to_local(all.ours[1].grad()).clone();
      CHECK_THROWS_WITH_AS(clip_grad_norm_(all.ours, 1.0, norm_type, /*error_if_nonfinite=*/true),
                           doctest::Contains("clip_grad_norm_: the norm of order"), std::runtime_error);
      CHECK(to_local(all.ours[1].grad()).equal(before));
      const double want = torch::nn::utils::clip_grad_norm_(all.plain, 1.0, norm_type);
      check_norm(clip_grad_norm_(all.ours, 1.0, norm_type), want);
      all.check_gradients();
    }
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: one parameter, one that is listed twice, and none", {1, 2}) {
  const DeviceMesh mesh = line(world()->size());
  Parameters all;
  all.add(numbers({7, 3}, 0.1), &mesh, {Shard(0)});
  const double want = torch::nn::utils::clip_grad_norm_(all.plain[0], 0.5);
  CHECK(clip_grad_norm_({all.ours[0], all.ours[0]}, 1e9) == doctest::Approx(want).epsilon(1e-13));
  check_norm(clip_grad_norm_(all.ours[0], 0.5), want);
  all.check_gradients();
  CHECK(clip_grad_norm_(std::vector<at::Tensor>(), 1.0) == 0);
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: what it refuses", {1, 2}) {
  const std::vector<at::Tensor> one = {torch::zeros({2})};
  for (const double bad : {-1.0, kNan}) {
    CHECK_THROWS_WITH_AS(clip_grad_norm_(one, bad), doctest::Contains("clip_grad_norm_: max_norm is "),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(clip_grad_norm_(one, 1.0, bad), doctest::Contains("clip_grad_norm_: norm_type is "),
                         std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS(clip_grad_norm_(one, 1.0, 0.0), doctest::Contains("norm_type is 0; it must be positive"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(clip_grad_norm_({torch::zeros({2}), at::Tensor()}, 1.0),
                       doctest::Contains("clip_grad_norm_: parameter 1 is undefined"), std::invalid_argument);
  const at::Tensor sparse = torch::zeros({3, 2}).requires_grad_();
  sparse.mutable_grad() = torch::ones({3, 2}).to_sparse();
  CHECK_THROWS_WITH_AS(clip_grad_norm_({sparse}, 1.0), doctest::Contains("a gradient of [3, 2] is sparse"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: parameters on a mesh and on a slice of it", {2, 4}) {
  const DeviceMesh mesh = grid(), tp = mesh["tp"];
  Parameters all;
  add_layouts(all, mesh);
  add_layouts(all, tp);
  const double want = torch::nn::utils::clip_grad_norm_(all.plain, 0.5);
  const CommCounter counter(mesh);
  const double got = clip_grad_norm_(all.ours, 0.5);
  // Sums: tp for both meshes together, and dp. The maximum: dp and tp.
  CHECK(counter.total() == (world()->size() == 4 ? 4 : 2));
  check_norm(got, want);
  all.check_gradients();
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: slices of one mesh of which none contains the other", {4}) {
  const DeviceMesh mesh = grid();
  Parameters all;
  add_layouts(all, mesh["dp"]);
  add_layouts(all, mesh["tp"]);
  const double want = torch::nn::utils::clip_grad_norm_(all.plain, 0.5);
  check_norm(clip_grad_norm_(all.ours, 0.5), want);
  all.check_gradients();
}

// Returns the meshes of two stages that share no rank.
std::vector<DeviceMesh> stages_apart() {
  const int64_t size = world()->size(), half = size / 2;
  std::vector<int64_t> first, second;
  for (int64_t rank = 0; rank < size; ++rank) (rank < half ? first : second).push_back(rank);
  return {DeviceMesh(world(), c10::kCPU, Mesh({half}, {"tp"}, first)),
          DeviceMesh(world(), c10::kCPU, Mesh({size - half}, {"tp"}, second))};
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: meshes that share no rank, with ranks outside of each", {2, 3, 4}) {
  const std::vector<DeviceMesh> stages = stages_apart();
  for (const double norm_type : {2.0, kInf}) {
    Parameters all;
    for (const DeviceMesh& stage : stages) add_layouts(all, stage);
    all.add(numbers({3}, 2.0));
    const double want = torch::nn::utils::clip_grad_norm_(all.plain, 0.5, norm_type);
    check_norm(clip_grad_norm_(all.ours, 0.5, norm_type), want);
    for (std::size_t i = 0; i < all.ours.size(); ++i) {
      const at::Tensor grad = all.ours[i].grad();
      const at::Tensor whole = !is_dtensor(grad)           ? grad
                               : mesh_of(grad).is_member() ? full_tensor(grad)
                                                           : all.plain[i].grad();
      CHECK(torch::allclose(whole, all.plain[i].grad(), 1e-13, 1e-13));
    }
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: stages of a pipeline, of which each rank lists its own parameters", {2, 4}) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, world()->size() / 2}, {"pp", "tp"}, world());
  const auto stage = static_cast<double>(mesh.local_rank("pp"));
  const DeviceMesh tp = mesh["tp"];
  for (const double norm_type : {2.0, kInf}) {
    Parameters mine, both;
    mine.add(numbers({7, 3}, stage), &tp, {Shard(0)});
    mine.add(numbers({4}, stage + 5), &tp, {Replicate()});
    mine.add(numbers({3}, stage + 7));
    for (const double each : {0.0, 1.0}) {
      both.add(numbers({7, 3}, each));
      both.add(numbers({4}, each + 5));
      both.add(numbers({3}, each + 7));
    }
    const double want = torch::nn::utils::clip_grad_norm_(both.plain, 0.5, norm_type);
    const CommCounter counter(mesh);
    const double got = clip_grad_norm_(mine.ours, 0.5, norm_type, false, mesh["pp"]);
    CHECK(counter.count_on("pp") == 1);
    CHECK(counter.total() == (world()->size() == 4 ? 2 : 1));
    check_norm(got, want);
    for (const at::Tensor& parameter : mine.plain) {
      parameter.mutable_grad() = parameter.grad() * (0.5 / (want + 1e-6));
    }
    mine.check_gradients();
  }
}

TESSERA_RANKS_TEST_CASE("max_over_meshes: every rank gets the largest value, however meshes overlap", {1, 2, 3, 4}) {
  const int64_t size = world()->size();
  const auto over = [](std::vector<int64_t> ranks) {
    const auto count = static_cast<int64_t>(ranks.size());
    return DeviceMesh(world(), c10::kCPU, Mesh({count}, {"d"}, std::move(ranks)));
  };
  std::vector<DeviceMesh> chain, single;
  for (int64_t rank = 0; rank + 1 < size; ++rank) chain.push_back(over({rank, rank + 1}));
  for (int64_t rank = 0; rank < size; ++rank) single.push_back(over({rank}));
  const std::vector<std::vector<DeviceMesh>> all = {{line(size), over({0})}, single, chain};
  for (const std::vector<DeviceMesh>& meshes : all) {
    for (int64_t largest = 0; largest < size; ++largest) {
      const at::Tensor mine = torch::tensor({world()->rank() == largest ? 7 : 1, 2});
      const at::Tensor want = torch::tensor({meshes.empty() && world()->rank() != largest ? 1 : 7, 2});
      CHECK(max_over_meshes(mine, meshes, "test").equal(want));
    }
  }
  const CommCounter counter(*world());
  max_over_meshes(torch::ones({1}), {over({0}), line(size), grid()}, "test");
  CHECK(counter.count_by_op("test") == (size > 1 ? 1 : 0));
}

// ---- LossScaler

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
  const DeviceMesh mesh = init_device_mesh("cpu", {2, world()->size() / 2}, {"pp", "tp"}, world());
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
  for (const LossScalerState& state : {LossScalerState{0, 0}, {kInf, 0}, {kNan, 0}, {1, -1}}) {
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
  refused({.initial_scale = 0}, "initial_scale is 0; it must be positive and finite");
  refused({.growth_factor = 1}, "growth_factor is 1; it must be more than 1");
  refused({.backoff_factor = 1}, "backoff_factor is 1; it must be between 0 and 1");
  refused({.growth_interval = 0}, "growth_interval is 0; it must be 1 or more");
  const at::Tensor half = torch::zeros({2}, torch::kHalf).requires_grad_();
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  torch::optim::SGD optimizer({half}, 1.0);
  CHECK_THROWS_WITH_AS(LossScaler().step(optimizer), doctest::Contains("a gradient of [2] is float16"),
                       std::invalid_argument);
}

}  // namespace
}  // namespace tessera

// Compares clip_grad_norm_ with LibTorch's function in one process.

#include "tessera/dtensor/clip_grad_norm.h"

#include <cmath>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/over_meshes.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/gradients.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using namespace testing;

constexpr double kFloatRounding = 1e-6;  // of norms and gradients in float

// Checks that every rank has the same bits.
void check_alike(double value) {
  const DeviceMesh mesh = line(world()->size());
  const at::Tensor all = all_gather(torch::tensor({value}, on(torch::kDouble)).view(torch::kLong), mesh, 0);
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

// Clips by one of the two functions, and returns the norm.
double clip(bool on_device, const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
            const std::optional<DeviceMesh>& stages = std::nullopt) {
  if (!on_device) return clip_grad_norm_(parameters, max_norm, norm_type, /*error_if_nonfinite=*/false, stages);
  return clip_grad_norm_on_device_(parameters, max_norm, norm_type, stages).item<double>();
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
        all.ours.push_back(torch::zeros({2}, on(at::kFloat)));  // without a gradient
        all.plain.push_back(torch::zeros({2}, on(at::kFloat)));
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
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
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
    const double want = std::sqrt(sum), got = clip(on_device, all.ours, 0.25);
    check_norm(got, want, kFloatRounding);
    for (const at::Tensor& parameter : all.plain) parameter.mutable_grad() = parameter.grad() * (0.25 / (want + 1e-6));
    all.check_gradients(kFloatRounding);
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: a factor that 16 bits would round to 0 scales gradients of 16 bits", {1, 3}) {
  const DeviceMesh mesh = line(world()->size());
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
    Parameters all;
    all.add(torch::full({5}, 3e4, on(at::kHalf)), &mesh, {Shard(0)});
    all.add(torch::full({4}, 5e11, on(at::kFloat)), &mesh, {Replicate()});
    check_norm(clip(on_device, all.ours, 1e3), 1e12, kFloatRounding);  // the factor is 1e-9
    const at::Tensor half = full_tensor(all.ours[0].grad());
    CHECK(torch::allclose(half.to(at::kDouble), torch::full({5}, 3e-5, on(at::kDouble)), 1e-2, 0));
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: the norm of many floats keeps their digits", {1, 2, 3}) {
  const DeviceMesh mesh = line(world()->size());
  Parameters all;
  all.add(numbers({1031, 1009}, 0.1).to(torch::kFloat), &mesh, {Shard(0)});
  all.add(numbers({700, 800}, 0.2).to(torch::kFloat), &mesh, {Replicate()});
  double sum = 0;
  for (const at::Tensor& parameter : all.plain)
    sum += parameter.grad().to(torch::kDouble).square().sum().item<double>();
  check_norm(clip_grad_norm_(all.ours, 0.25), std::sqrt(sum), kFloatRounding);
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: a number that is not finite on one rank counts on all", {1, 2, 4}) {
  const DeviceMesh mesh = grid();
  for (const double bad : {kInf, -kInf, kNan}) {
    for (const double norm_type : {2.0, kInf}) {
      for (const bool on_device : {false, true}) {
        CAPTURE(bad);
        CAPTURE(norm_type);
        CAPTURE(on_device);
        Parameters all;
        add_layouts(all, mesh);
        const at::Tensor gradient = numbers({7, 3}, 0.9);
        gradient[6][2] = bad;
        all.add(gradient, &mesh, {Replicate(), Shard(0)});
        if (!on_device) {
          const at::Tensor before = to_local(all.ours[1].grad()).clone();
          CHECK_THROWS_WITH_AS(clip_grad_norm_(all.ours, 1.0, norm_type, /*error_if_nonfinite=*/true),
                               doctest::Contains("clip_grad_norm_: the norm of order"), std::runtime_error);
          CHECK(to_local(all.ours[1].grad()).equal(before));
        }
        const double want = torch::nn::utils::clip_grad_norm_(all.plain, 1.0, norm_type);
        check_norm(clip(on_device, all.ours, 1.0, norm_type), want);
        all.check_gradients();
      }
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

TESSERA_RANKS_TEST_CASE("clip_grad_norm_on_device_ gives the same norm and gradients, as a tensor", {1, 2, 4}) {
  const DeviceMesh mesh = line(world()->size());
  for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    for (const double most : {0.5, 1e9}) {
      Parameters all;
      all.add(numbers({7, 3}, 0.1), &mesh, {Shard(0)});
      all.add(numbers({4}, 0.2), &mesh, {Replicate()});
      const double want = torch::nn::utils::clip_grad_norm_(all.plain, most, norm_type);
      const at::Tensor norm = clip_grad_norm_on_device_(all.ours, most, norm_type);
      CHECK(std::string(c10::toString(norm.scalar_type())) == "Double");
      check_norm(norm.item<double>(), want);
      all.check_gradients();
    }
  }
  CHECK(clip_grad_norm_on_device_({}, 1.0).item<double>() == 0);
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: what it refuses", {1, 2}) {
  const std::vector<at::Tensor> one = {torch::zeros({2}, on(at::kFloat))};
  for (const double bad : {-1.0, kNan}) {
    CHECK_THROWS_WITH_AS(clip_grad_norm_(one, bad), doctest::Contains("clip_grad_norm_: max_norm is "),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(clip_grad_norm_(one, 1.0, bad), doctest::Contains("clip_grad_norm_: norm_type is "),
                         std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS(clip_grad_norm_(one, 1.0, 0.0), doctest::Contains("norm_type is 0; it must be positive"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(clip_grad_norm_({torch::zeros({2}, on(at::kFloat)), at::Tensor()}, 1.0),
                       doctest::Contains("clip_grad_norm_: parameter 1 is undefined"), std::invalid_argument);
  const at::Tensor sparse = torch::zeros({3, 2}, on(at::kFloat)).requires_grad_();
  sparse.mutable_grad() = torch::ones({3, 2}, on(at::kFloat)).to_sparse();
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
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, world()->size() / 2}, {"pp", "tp"}, world());
  const auto stage = static_cast<double>(mesh.local_rank("pp"));
  const DeviceMesh tp = mesh["tp"];
  const auto check = [&](bool on_device, double norm_type) {
    CAPTURE(on_device);
    CAPTURE(norm_type);
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
    const double got = clip(on_device, mine.ours, 0.5, norm_type, mesh["pp"]);
    CHECK(counter.count_on("pp") == 1);
    CHECK(counter.total() == (world()->size() == 4 ? 2 : 1));
    check_norm(got, want);
    for (const at::Tensor& parameter : mine.plain) {
      parameter.mutable_grad() = parameter.grad() * (0.5 / (want + 1e-6));
    }
    mine.check_gradients();
  };
  for (const bool on_device : {false, true}) {
    for (const double norm_type : {2.0, kInf}) check(on_device, norm_type);
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_: a parameter that has a gradient on some ranks only counts where it has one",
                        {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : {line(world()->size()), grid()}) {
    for (const bool on_device : {false, true}) {
      Parameters all;
      // An expert to which no token of the last rank went. It is the only parameter that is cut.
      all.add(numbers({9, 2}, 0.1), &mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Shard(0)));
      all.add(numbers({4}, 0.2), &mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()));
      const at::Tensor piece = to_local(all.ours[0].grad()).clone();
      const bool last = world()->rank() == world()->size() - 1;
      if (last) all.ours[0].mutable_grad() = at::Tensor();
      at::Tensor squares = last ? torch::zeros({}, piece.options()) : piece.square().sum();
      for (int64_t dim = 0; dim < mesh.ndim(); ++dim) squares = all_reduce(squares, mesh, dim, ReduceOp::kSum);
      const double want = std::sqrt(squares.item<double>() + all.plain[1].grad().square().sum().item<double>());
      const CommCounter counter(mesh);
      const double got = clip(on_device, all.ours, 0.5);
      int64_t dims = 0;
      for (int64_t dim = 0; dim < mesh.ndim(); ++dim) dims += mesh.size(dim) > 1 ? 1 : 0;
      CHECK(counter.total() == dims);
      check_norm(got, want);
      if (!last) CHECK(torch::allclose(to_local(all.ours[0].grad()), piece * (0.5 / (want + 1e-6)), 1e-12, 1e-12));
    }
  }
}

TESSERA_RANKS_TEST_CASE("clip_grad_norm_ and LossScaler scale gradients once that are views of one tensor", {1, 2, 3}) {
  const DeviceMesh mesh = line(world()->size());
  const at::Tensor factor = numbers({1, 4, 6}, 0.7);
  for (const bool plain : {false, true}) {
    const auto leaf_of = [&](double seed) {
      const at::Tensor values = numbers({4, 6}, seed);
      return (plain ? values : distribute_tensor(values, mesh, {Shard(0)}, kNoSource)).detach().requires_grad_();
    };
    // Two embeddings of positions, added to a batch of one.
    const at::Tensor a = leaf_of(0.1), b = leaf_of(0.2);
    const auto backward = [&] {
      a.mutable_grad() = at::Tensor();
      b.mutable_grad() = at::Tensor();
      const at::Tensor x = plain ? factor : distribute_tensor(factor, mesh, {Shard(1)}, kNoSource);
      ((a.unsqueeze(0) + b.unsqueeze(0)) * x).sum().backward();
    };
    const auto check = [&](double scale) {
      for (const at::Tensor& each : {a, b}) {
        const at::Tensor whole = plain ? each.grad() : full_tensor(each.grad());
        CHECK(torch::allclose(whole, factor[0] * scale, 1e-12, 1e-12));
      }
    };
    backward();
    check(1);
    const double norm = std::sqrt(2 * factor.square().sum().item<double>());
    CHECK(clip_grad_norm_({a, b}, 0.5) == doctest::Approx(norm));
    check(0.5 / (norm + 1e-6));
    backward();
    torch::optim::SGD optimizer(std::vector<at::Tensor>{a, b}, 0.1);
    LossScaler({.initial_scale = 1024}).unscale_(optimizer);
    check(1.0 / 1024);
  }
}

TEST_CASE("clip_grad_norm_ and LossScaler: what one stage refuses ends the others") {
  const auto refusals = [](const std::function<void(const at::Tensor& parameter, const DeviceMesh& stages)>& call) {
    return thrown([&](const DeviceMesh& stages, bool odd) {
      at::Tensor parameter = torch::zeros({3, 2}).requires_grad_();
      parameter.mutable_grad() = odd ? torch::eye(3).narrow(1, 0, 2).to_sparse() : torch::ones({3, 2});
      call(parameter, stages);
    });
  };
  const auto check = [](const std::vector<std::string>& texts, const std::string& where) {
    CHECK(texts[1].find("is sparse; make it dense") != std::string::npos);
    CHECK(texts[0].find("rank 1 failed in " + where) != std::string::npos);
  };
  check(refusals([](const at::Tensor& p, const DeviceMesh& stages) { clip_grad_norm_(p, 1, 2, false, stages); }),
        "clip_grad_norm_");
  check(refusals([](const at::Tensor& p, const DeviceMesh& stages) { clip_grad_norm_on_device_({p}, 1, 2, stages); }),
        "clip_grad_norm_");
  check(refusals([](const at::Tensor& p, const DeviceMesh& stages) {
          torch::optim::SGD optimizer(std::vector<at::Tensor>{p}, 0.1);
          LossScaler({.stages = stages}).unscale_(optimizer);
        }),
        "LossScaler");
}

TESSERA_RANKS_TEST_CASE("max_over_meshes: every rank gets the largest value, however meshes overlap", {1, 2, 3, 4}) {
  const int64_t size = world()->size();
  const auto over = [](std::vector<int64_t> ranks) {
    const auto count = static_cast<int64_t>(ranks.size());
    return DeviceMesh(world(), device().type(), Mesh({count}, {"d"}, std::move(ranks)));
  };
  std::vector<DeviceMesh> chain, single;
  for (int64_t rank = 0; rank + 1 < size; ++rank) chain.push_back(over({rank, rank + 1}));
  for (int64_t rank = 0; rank < size; ++rank) single.push_back(over({rank}));
  const std::vector<std::vector<DeviceMesh>> all = {{line(size), over({0})}, single, chain};
  for (const std::vector<DeviceMesh>& meshes : all) {
    for (int64_t largest = 0; largest < size; ++largest) {
      const at::Tensor mine = torch::tensor({world()->rank() == largest ? 7 : 1, 2}, on(at::kLong));
      const at::Tensor want = torch::tensor({meshes.empty() && world()->rank() != largest ? 1 : 7, 2}, on(at::kLong));
      CHECK(max_over_meshes(mine, meshes, "test").equal(want));
    }
  }
  const CommCounter counter(*world());
  max_over_meshes(torch::ones({1}, on(at::kFloat)), {over({0}), line(size), grid()}, "test");
  CHECK(counter.count_by_op("test") == (size > 1 ? 1 : 0));
}

}  // namespace
}  // namespace tessera

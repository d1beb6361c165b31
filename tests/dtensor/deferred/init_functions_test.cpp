// Tests torch::nn::init's functions on DTensors, and Tessera's own: they give the same bits with any sharding.

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/init.h>
#include <torch/torch.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/init.h"
#include "tessera/dtensor/random.h"
#include "tessera/tests/dtensor/deferred/peak_memory.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
namespace init = torch::nn::init;

struct InitRow {
  std::string why;
  std::vector<int64_t> shape;
  std::function<void(at::Tensor)> fill;
};

const std::vector<InitRow>& init_rows() {
  static const std::vector<InitRow> all = {
      {"constant_", {7, 5}, [](const at::Tensor& t) { init::constant_(t, 0.5); }},
      {"ones_", {7, 5}, [](const at::Tensor& t) { init::ones_(t); }},
      {"zeros_", {7, 5}, [](const at::Tensor& t) { init::zeros_(t); }},
      {"eye_", {7, 5}, [](const at::Tensor& t) { init::eye_(t); }},
      {"dirac_", {6, 5, 3}, [](const at::Tensor& t) { dirac_(t); }},
      {"uniform_", {7, 5}, [](const at::Tensor& t) { init::uniform_(t, -2, 3); }},
      {"normal_", {7, 5}, [](const at::Tensor& t) { init::normal_(t, 1, 2); }},
      {"xavier_uniform_", {7, 5}, [](const at::Tensor& t) { init::xavier_uniform_(t); }},
      {"xavier_normal_", {7, 5, 2}, [](const at::Tensor& t) { init::xavier_normal_(t, 2); }},
      {"kaiming_uniform_", {7, 5}, [](const at::Tensor& t) { init::kaiming_uniform_(t); }},
      {"kaiming_normal_", {7, 5}, [](const at::Tensor& t) { init::kaiming_normal_(t); }},
      {"orthogonal_ of few columns", {9, 4}, [](const at::Tensor& t) { orthogonal_(t); }},
      {"orthogonal_ of few rows", {3, 10}, [](const at::Tensor& t) { orthogonal_(t, 2); }},
      {"orthogonal_, three dimensions", {5, 3, 4}, [](const at::Tensor& t) { orthogonal_(t); }},
      {"orthogonal_, more columns than a block", {40, 40}, [](const at::Tensor& t) { orthogonal_(t); }},
      {"sparse_", {10, 6}, [](const at::Tensor& t) { sparse_(t, 0.25, 0.5); }},
  };
  return all;
}

at::Tensor filled(const InitRow& row, const DeviceMesh& mesh, const Placements& placements, at::ScalarType dtype) {
  manual_seed(11, mesh.world());
  const at::Tensor t = empty(row.shape, mesh, placements, dtype);
  row.fill(t);
  return t;
}

}  // namespace

TEST_CASE(
    "every function of torch::nn::init, and Tessera's, gives the same bits on 1 to 4 ranks, cut along any dimension") {
  for (const InitRow& row : init_rows()) {
    CAPTURE(row.why);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor whole = to_local(filled(row, fake_mesh(0, {1}), {Replicate()}, dtype));
      for (const int64_t size : {1, 2, 3, 4}) {
        for (int64_t rank = 0; rank < size; ++rank) {
          const DeviceMesh mesh = fake_mesh(rank, {size});
          for (const Placement& cut : {Replicate(), Shard(0), Shard(1), BlockCyclic(0, 2)}) {
            CAPTURE(size);
            CAPTURE(rank);
            CAPTURE(to_string(cut));
            CHECK(same(to_local(filled(row, mesh, {cut}, dtype)), piece_of(whole, mesh, {cut})));
          }
        }
      }
      const DeviceMesh grid = fake_mesh(3, {2, 2});
      for (const Placements& cut : {Placements{Shard(0), Shard(1)}, Placements{Shard(1), Shard(1)}}) {
        CHECK(same(to_local(filled(row, grid, cut, dtype)), piece_of(whole, grid, cut)));
      }
    }
  }
}

TEST_CASE("eye_ and dirac_ give what they give on plain tensors") {
  for (const InitRow& row : init_rows()) {
    if (row.why != "eye_" && row.why != "dirac_") continue;
    const at::Tensor plain = torch::empty(row.shape);
    row.why == "eye_" ? init::eye_(plain) : init::dirac_(plain);
    CHECK(same(to_local(filled(row, fake_mesh(0, {1}), {Replicate()}, at::kFloat)), plain));
  }
}

TEST_CASE("orthogonal_: rows or columns are orthonormal, times the gain, and their signs and directions vary") {
  const DeviceMesh mesh = fake_mesh(0, {1});
  const auto make = [&](std::vector<int64_t> shape, double gain) {
    const at::Tensor t = empty(shape, mesh, {Replicate()}, at::kDouble);
    orthogonal_(t, gain);
    return to_local(t);
  };
  const at::Tensor tall = make({30, 12}, 1), wide = make({12, 30}, 3), square = make({20, 20}, 1);
  const auto identity = [](int64_t n) { return torch::eye(n, torch::kDouble); };
  CHECK(torch::allclose(tall.t().mm(tall), identity(12), 0, 1e-13));
  CHECK(torch::allclose(wide.mm(wide.t()), 9 * identity(12), 0, 1e-12));
  CHECK(torch::allclose(square.mm(square.t()), identity(20), 0, 1e-13));
  CHECK_FALSE(torch::allclose(square, make({20, 20}, 1)));
  // In uniformly distributed rotations of 4 dimensions every entry has mean 0 and mean square 1/4.
  at::Tensor sum = torch::zeros({4, 4}, torch::kDouble), squares = sum.clone();
  constexpr int kTimes = 4000;
  for (int i = 0; i < kTimes; ++i) {
    const at::Tensor q = make({4, 4}, 1);
    sum += q;
    squares += q * q;
  }
  CHECK((sum / kTimes).abs().max().item<double>() < 4.5 * 0.5 / std::sqrt(kTimes));
  CHECK((squares / kTimes - 0.25).abs().max().item<double>() < 0.02);
}

TEST_CASE("sparse_: as many zeros in each column as asked for, elsewhere normal numbers") {
  const DeviceMesh mesh = fake_mesh(0, {1});
  for (const double sparsity : {0.0, 0.25, 1.0}) {
    const at::Tensor t = empty({10, 300}, mesh, {Replicate()}, at::kDouble);
    sparse_(t, sparsity, 2);
    const at::Tensor zeros = (to_local(t) == 0).sum(0);
    CHECK((zeros == static_cast<int64_t>(std::ceil(sparsity * 10))).all().item<bool>());
    if (sparsity == 0.25) {
      CHECK(to_local(t).abs().max().item<double>() > 4);
      CHECK(((to_local(t) == 0).sum(1) > 0).all().item<bool>());
    }
  }
}

TEST_CASE("peak memory of orthogonal_ and sparse_ on a quarter of a matrix stays below the whole") {
  constexpr int64_t kSize = 512;
  constexpr int64_t kWhole = kSize * kSize * 4;
  const DeviceMesh mesh = fake_mesh(2, {4});
  for (const Placement& cut : {Shard(0), Shard(1)}) {
    const at::Tensor t = empty({kSize, kSize}, mesh, {cut});
    const int64_t orthogonal = peak_bytes([&] { orthogonal_(t); });
    const int64_t sparse = peak_bytes([&] { sparse_(t, 0.5); });
    MESSAGE(to_string(cut), ": whole ", kWhole, " bytes; beside the piece: orthogonal_ ", orthogonal, ", sparse_ ",
            sparse);
    CHECK(orthogonal < kWhole);
    CHECK(sparse < kWhole / 2);
  }
}

TEST_CASE("refused: plain tensors, other numbers of dimensions, integers; torch's own orthogonal_ on DTensors") {
  const DeviceMesh mesh = fake_mesh(0, {2});
  CHECK_THROWS_WITH_AS(orthogonal_(torch::empty({3, 3})), doctest::Contains("torch::nn::init::orthogonal_"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(orthogonal_(empty({3}, mesh, {Shard(0)})), doctest::Contains("2 to 64 dimensions"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(sparse_(empty({3, 3, 3}, mesh, {Shard(0)}), 0.5), doctest::Contains("[3, 3, 3]"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(sparse_(empty({3, 3}, mesh, {Shard(0)}, at::kLong), 0.5), doctest::Contains("Long"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(sparse_(empty({3, 3}, mesh, {Shard(0)}, at::kFloat8_e5m2), 0.5),
                       doctest::Contains("a DTensor of Half, BFloat16, Float or Double"), std::invalid_argument);
  const at::Tensor terms = from_local(torch::ones({4, 4, 3}), mesh, {Partial()});
  CHECK_THROWS_WITH_AS(dirac_(terms), doctest::Contains("[P(sum)] has a pending reduction"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(sparse_(empty({3, 3}, mesh, {Shard(0)}), 1.5), doctest::Contains("sparsity 1.5"),
                       std::invalid_argument);
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{4, 4}, {3, 2, 5}}) {
    for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
      CAPTURE(to_string(placement));
      CHECK_THROWS_WITH_AS(
          init::orthogonal_(empty(shape, mesh, {placement})),
          doctest::Contains(
              "torch::nn::init::orthogonal_ draws a plain tensor on each rank and copies it: tessera::orthogonal_"),
          std::invalid_argument);
    }
  }
}

TEST_CASE(
    "autograd sees that orthogonal_, sparse_ and dirac_ write: the version moves on, and a saved tensor is not taken "
    "for "
    "what it was") {
  const DeviceMesh mesh = fake_mesh(0, {2});
  const std::vector<std::function<void(const at::Tensor&)>> writes = {
      [](const at::Tensor& t) { orthogonal_(t.flatten(1)); }, [](const at::Tensor& t) { sparse_(t.flatten(1), 0.5); },
      [](const at::Tensor& t) { dirac_(t); }, [](const at::Tensor& t) { orthogonal_(t); }};
  for (std::size_t i = 0; i < writes.size(); ++i) {
    CAPTURE(i);
    const at::Tensor weight = ones({4, 2, 3}, mesh, {Shard(0)});
    const at::Tensor x = ones({4, 2, 3}, mesh, {Shard(0)}).set_requires_grad(true);
    const at::Tensor y = (x * weight).sum();
    const auto before = weight._version();
    writes[i](weight);
    CHECK(weight._version() == before + 1);
    CHECK_THROWS_WITH(y.backward(), doctest::Contains("modified by an inplace operation"));
  }
}

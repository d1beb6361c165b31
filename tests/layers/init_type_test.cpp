#include "tessera/layers/init_type.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::vector<std::string> kNames = {
    "orthogonal",     "normal",         "biased_normal", "uniform",      "kaiming_uniform",
    "kaiming_normal", "xavier_uniform", "xavier_normal", "trunc_normal", "dirac",
    "constant",       "zeros",          "ones"};

// Returns the whole weight that the type gives on `mesh`.
at::Tensor initialized(InitType type, at::IntArrayRef sizes, const DeviceMesh& mesh, const Placement& placement) {
  manual_seed(5, mesh.world());
  const at::Tensor weight = tessera::empty(sizes, mesh, {placement}, at::kDouble);
  initialize_(weight, type);
  return full_tensor(weight);
}

DeviceMesh alone() { return {World::fake(0, 1), c10::kCPU, Mesh({1})}; }

}  // namespace

TEST_CASE("thirteen types, by name") {
  for (const std::string& name : kNames) CHECK(to_string(init_type(name)) == name);
  CHECK_THROWS_WITH_AS(init_type("glorot"), doctest::Contains("there is no \"glorot\"; there are orthogonal, normal"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("every type gives the same values on any number of ranks, cut or not", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const std::vector<int64_t> sizes = name == "dirac" ? std::vector<int64_t>{6, 5, 3} : std::vector<int64_t>{10, 6};
    const at::Tensor want = initialized(init_type(name), sizes, alone(), Replicate());
    for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
      CHECK(same(initialized(init_type(name), sizes, mesh, placement), want));
    }
  }
}

TEST_CASE("the numbers of each type") {
  const DeviceMesh mesh = alone();
  const auto weight = [&](const char* name) { return initialized(init_type(name), {200, 100}, mesh, Replicate()); };
  const auto deviation = [&](const char* name) { return weight(name).std().item<double>(); };
  CHECK(close(at::matmul(weight("orthogonal").t(), weight("orthogonal")), at::eye(100, at::kDouble) * 1e-4, 1e-10));
  for (const char* const name : {"normal", "biased_normal", "trunc_normal"}) {
    CHECK(deviation(name) == doctest::Approx(0.01).epsilon(0.03));
    CHECK(std::abs(weight(name).mean().item<double>()) < 5e-4);
  }
  CHECK(weight("uniform").min().item<double>() >= 0);
  CHECK(weight("uniform").max().item<double>() < 0.02);
  CHECK(weight("uniform").mean().item<double>() == doctest::Approx(0.01).epsilon(0.03));
  CHECK(deviation("kaiming_uniform") == doctest::Approx(std::sqrt(2.0 / 100)).epsilon(0.03));
  CHECK(deviation("kaiming_normal") == doctest::Approx(std::sqrt(2.0 / 100)).epsilon(0.03));
  CHECK(deviation("xavier_uniform") == doctest::Approx(std::sqrt(2.0 / 300)).epsilon(0.03));
  CHECK(deviation("xavier_normal") == doctest::Approx(std::sqrt(2.0 / 300)).epsilon(0.03));
  CHECK(same(weight("constant"), at::full({200, 100}, 0.02, at::kDouble)));
  CHECK(same(weight("zeros"), at::zeros({200, 100}, at::kDouble)));
  CHECK(same(weight("ones"), at::ones({200, 100}, at::kDouble)));
  CHECK(same(initialized(InitType::kDirac, {6, 5, 3}, mesh, Replicate()),
             torch::nn::init::dirac_(at::empty({6, 5, 3}, at::kDouble))));
  CHECK_THROWS_WITH(weight("dirac"), doctest::Contains("3"));
}

TESSERA_RANKS_TEST_CASE("a rank's piece of an affine weight, in strides, is cut from the same whole", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  for (const int64_t stride : {1, 2}) {
    for (const int64_t dim : {0, 1}) {
      const std::vector<int64_t> sizes = dim == 0 ? std::vector<int64_t>{16, 6} : std::vector<int64_t>{6, 16};
      const at::Tensor whole = initialized(InitType::kXavierNormal, sizes, alone(), Replicate());
      manual_seed(5, mesh.world());
      at::Tensor piece = at::empty(dim == 0 ? at::IntArrayRef{16 / n, 6} : at::IntArrayRef{6, 16 / n}, at::kDouble);
      initialize_affine_weight_(piece, sizes[0], sizes[1], 16 / n, dim, mesh, init_method(InitType::kXavierNormal),
                                stride);
      std::vector<at::Tensor> mine;
      for (int64_t part = 0; part < stride; ++part)
        mine.push_back(whole.chunk(n * stride, dim)[part * n + mesh.local_rank(0)]);
      CHECK(same(piece, at::cat(mine, dim)));
    }
  }
  const at::Tensor piece = at::empty({4, 6});
  const auto fill = [&](int64_t out, int64_t per_partition, int64_t dim, int64_t stride) {
    initialize_affine_weight_(piece, out, 6, per_partition, dim, mesh, init_method(InitType::kOnes), stride);
  };
  CHECK_THROWS_WITH_AS(fill(4 * n, 4, 2, 1), doctest::Contains("partition_dim 2"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(fill(4 * n, 3, 0, 1), doctest::Contains("a weight [4, 6] for 3 of"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(fill(4 * n, 4, 0, 3), doctest::Contains("with 3 pieces each"), std::invalid_argument);
}

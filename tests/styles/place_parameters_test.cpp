// Tests PlaceParameters, which only lays out a module's parameters.

#include <torch/nn.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

// Has two convolutions, and a mixture of products with parameters of its own.
struct PlacedNetImpl : torch::nn::Module {
  PlacedNetImpl()
      : first(register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 5, 3).padding(1)))),
        second(register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(5, 3, 3).padding(1)))),
        mix(register_parameter("mix", sample({3, 4, 6}, 7))) {
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    to(at::kDouble);
    for (at::Tensor& p : parameters()) p.copy_(sample(p.sizes().vec(), ++seed));
  }
  // [batch, 2, 4, 4] -> [3, batch * 4, 6]
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = second(at::tanh(first(x)));
    return at::bmm(y.permute({1, 0, 2, 3}).reshape({3, -1, 4}), mix);
  }
  torch::nn::Conv2d first, second;
  at::Tensor mix;
};
TORCH_MODULE(PlacedNet);

const ParallelPlan kChannels = {{"first", PlaceParameters({{"weight", Shard(0)}, {"bias", Shard(0)}})},
                                {"second", PlaceParameters({{"weight", Shard(1)}})},
                                {"", PlaceParameters({{"mix", Shard(-1)}})}};

}  // namespace

TEST_CASE("PlaceParameters: convolutions cut by channels, and a parameter of the module's own, equal one process") {
  PlacedNet plain;
  const at::Tensor x = sample({3, 2, 4, 4}, 5);
  const at::Tensor want = plain(x);
  want.square().sum().backward();
  for (const int64_t size : {1, 2, 3, 4}) {
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), {size}, {"tp"}, world);
      PlacedNet module;
      auto tp = parallelize_module(module, mesh, kChannels);
      CHECK(placements_of(module->first->weight) == Placements{Shard(0)});
      CHECK(placements_of(module->second->weight) == Placements{Shard(1)});
      CHECK(placements_of(module->second->bias) == Placements{Replicate()});
      CHECK(placements_of(module->mix) == Placements{Shard(2)});
      const CommCounter counter(mesh);
      const at::Tensor got = tp(x);
      // The second convolution sums over the channels that ranks hold; all else follows from the pieces.
      CHECK(counter.total() == (size > 1 ? 1 : 0));
      CHECK(close(full_tensor(got.detach()), want.detach()));
      got.square().sum().backward();
      const std::vector<at::Tensor> mine = module->parameters(), whole = plain->parameters();
      for (std::size_t i = 0; i < mine.size(); ++i) {
        CHECK(placements_of(mine[i].grad()) == placements_of(mine[i]));
        CHECK(close(full_tensor(mine[i].grad()), whole[i].grad()));
      }
    });
  }
}

TEST_CASE("PlaceParameters: it is printed with what it places, and refuses what it cannot place") {
  const PlaceParameters style({{"weight", Shard(0)}, {"bias", Replicate()}});
  CHECK(style.to_string() == "PlaceParameters(weight S(0), bias R)");
  const auto refused = [](PlaceParameters::Named placements, const std::string& text) {
    check_refused_on_every_rank({2}, {"tp"}, text, [&](const DeviceMesh& mesh) {
      torch::nn::Linear linear(4, 4);
      parallelize_module(linear, mesh, PlaceParameters(placements));
    });
  };
  refused({}, "(PlaceParameters()): it names no parameter");
  refused({{"weight", Shard(0)}, {"weight", Shard(0)}}, "'weight' is named twice");
  refused({{"wieght", Shard(0)}}, "has no parameter or buffer 'wieght'; it has weight, bias");
  refused({{"weight", Shard(2)}}, "weight of shape [4, 4] cannot have placement S(2)");
  refused({{"weight", Partial()}}, "cannot have placement P(sum)");
}

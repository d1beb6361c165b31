// Tests a linear layer that keeps its weight transposed, as GPT-2's Conv1D does, recognized by the name of its class.

#include <torch/nn.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

struct Conv1DImpl : torch::nn::Module {
  Conv1DImpl(int64_t in, int64_t out)
      : weight(register_parameter("weight", sample({in, out}, in))),
        bias(register_parameter("bias", sample({out}, out))) {}
  at::Tensor forward(const at::Tensor& x) { return at::addmm(bias, x, weight); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Conv1D);

namespace hooked {
TESSERA_MODULE(Conv1D);
}  // namespace hooked

struct Conv1DMlpImpl : torch::nn::Module {
  Conv1DMlpImpl() : up(register_module("up", Conv1D(5, 7))), down(register_module("down", Conv1D(7, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  Conv1D up, down;
};
TORCH_MODULE(Conv1DMlp);

}  // namespace

TEST_CASE("Conv1D under ColwiseParallel and RowwiseParallel equals one process, with the collectives of a Linear") {
  Conv1DMlp plain;
  const at::Tensor x = sample({6, 5}, 3);
  const at::Tensor want = plain(x);
  want.square().mean().backward();
  for (const int64_t size : {1, 2, 3, 4}) {
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), {size}, {"tp"}, world);
      Conv1DMlp module;
      auto tp = parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
      CHECK(placements_of(module->up->weight) == Placements{Shard(1)});
      CHECK(placements_of(module->up->bias) == Placements{Shard(0)});
      CHECK(placements_of(module->down->weight) == Placements{Shard(0)});
      CHECK(placements_of(module->down->bias) == Placements{Replicate()});
      const CommCounter counter(mesh);
      const at::Tensor got = tp(x);
      CHECK(counter.count("all_reduce") == (size > 1 ? 1 : 0));
      CHECK(counter.total() == counter.count("all_reduce"));
      CHECK(close(full_tensor(got.detach()), want.detach()));
      got.square().mean().backward();
      const std::vector<at::Tensor> mine = module->parameters(), whole = plain->parameters();
      for (std::size_t i = 0; i < mine.size(); ++i) CHECK(close(full_tensor(mine[i].grad()), whole[i].grad()));
    });
  }
}

TEST_CASE("a Conv1D that is a TESSERA_MODULE is recognized too, and shown by its own name") {
  run_in_process(1, [](const std::shared_ptr<World>& world) {
    hooked::Conv1D layer(5, 7);
    parallelize_module(layer, init_device_mesh(device_name(), {1}, {"tp"}, world), ColwiseParallel());
    CHECK(placements_of(layer->weight) == Placements{Shard(1)});
    CHECK(describe(*layer).rows.at(0).type == "(anonymous namespace)::Conv1DImpl");
  });
}

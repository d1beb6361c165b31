// The second program of docs/getting-started.md: trains a module on four ranks, and shows what lies and what travels.

#include <iostream>
#include <string>

#include <torch/torch.h>

#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"

namespace {

void train(const std::string& folder) {
  torch::manual_seed(0);
  const at::Tensor x = torch::randn({8, 16});
  const at::Tensor target = torch::randn({8, 16});

  Mlp model;
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
  auto tp = tessera::parallelize_module(model, mesh,
                                        {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const tessera::ImplicitReplication guard;  // the plain target counts as replicated
    const at::Tensor loss = torch::mse_loss(tp(x), target);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
  }

  tessera::save_weights(*model, folder + "/model.safetensors");
  tessera::save_optimizer(optimizer, *model, folder + "/optimizer.safetensors");

  tessera::load_weights(*model, folder + "/model.safetensors");
  tessera::load_optimizer(optimizer, *model, folder + "/optimizer.safetensors");

  const bool is_first = mesh.world().rank() == 0;
  if (is_first) std::cout << tessera::to_string(tessera::describe(*model)) << '\n';

  const tessera::CommCounter counter(mesh);
  {
    const tessera::Strict strict;  // from here on, an operator that would communicate on its own throws
    tp(x).square().mean().backward();
  }
  if (is_first) std::cout << counter.to_string() << std::flush;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: train FOLDER" << std::endl;
    return 1;
  }
  train(argv[1]);
}

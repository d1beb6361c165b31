// Trains two linear layers on all ranks, and the same layers on one process, and compares them.

#include <iostream>
#include <vector>

#include <torch/torch.h>

#include "tessera/tessera.h"

namespace {

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(16, 64));
    down = register_module("down", torch::nn::Linear(64, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }

  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

template <class Forward>
void train(Mlp& model, Forward&& forward, const at::Tensor& x) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    at::Tensor(forward(x)).square().mean().backward();
    optimizer.step();
  }
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const at::Tensor x = torch::randn({8, 16}, at::kDouble);
  Mlp plain, model;
  plain->to(at::kDouble);
  model->to(at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> to = model->parameters(), from = plain->parameters();
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }

  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
  auto tp = tessera::parallelize_module(model, mesh,
                                        {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
  train(model, tp, x);
  train(plain, plain, x);

  const at::Tensor parallel = tessera::full_tensor(tp(x));
  const bool agree = torch::allclose(parallel, plain(x), 1e-10, 1e-12);
  if (mesh.local_rank("tp") == 0) {
    std::cout << "Tessera " << tessera::library_version() << " with LibTorch " << tessera::libtorch_version() << ": "
              << (agree ? "four ranks and one process agree" : "FOUR RANKS AND ONE PROCESS DIFFER") << std::endl;
  }
  return agree ? 0 : 1;
}

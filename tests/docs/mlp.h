#pragma once

#include <torch/torch.h>

// A module of docs/getting-started.md: it knows nothing of Tessera.
struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(16, 64));
    down = register_module("down", torch::nn::Linear(64, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }

  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

struct FusedAdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
};

// AdamW (Loshchilov and Hutter, ICLR 2019) as torch::optim::AdamW computes it, by LibTorch's fused operator, one call
// for all parameters of one mesh and dtype. Counts of steps and the learning rate lie on the parameters' device, so
// that step() neither waits for a GPU nor changes from one step to the next: a CUDA graph may hold it. (LibTorch's
// class keeps the count on the host, where a graph would repeat it.) On a GPU the rate is a float32. There are no
// functions yet that save and load its state.
//
// Parameters may be plain tensors and DTensors, on several meshes; moments have their layouts. Does not communicate.
class FusedAdamW {
 public:
  // Throws std::invalid_argument on a parameter that is undefined or no leaf, on one that is listed twice, and on
  // options that torch::optim::AdamW refuses. Make it after parallelize_module.
  explicit FusedAdamW(const std::vector<at::Tensor>& parameters, const FusedAdamWOptions& options = {});

  // Updates the parameters that have a gradient.
  void step();
  // Zeroes the gradients in place, as a captured step needs, or drops them.
  void zero_grad(bool set_to_none = true);
  // Changes the learning rate from the next step on, that of a graph's next replay too. Does not wait for the device.
  void set_lr(double lr);

 private:
  struct State {
    at::Tensor parameter, moment, square, largest, steps;  // `largest` with amsgrad alone
  };
  // Holds the parameters of one mesh, or the plain ones, that have one dtype.
  struct Group {
    std::vector<State> states;
    at::Tensor lr;  // a number on the parameters' device: float64 on the CPU, else float32
  };

  FusedAdamWOptions options_;
  std::vector<Group> groups_;
};

}  // namespace tessera

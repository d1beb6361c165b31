#pragma once

#include <set>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::optim {
class AdamW;
}  // namespace torch::optim

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
// class keeps the count on the host, where a graph would repeat it.) On a GPU the rate is a float32.
//
// To save its state, give it to a torch::optim::AdamW of the same parameters, which save_optimizer and
// save_training_state take; to load it, take it from one. So what one class has saved, the other can load:
//   torch::optim::AdamW files(parameters);
//   fused.give_state(files);
//   save_training_state({.mesh = mesh, .model = *model, .optimizer = &files}, folder);
// Several objects of this class, such as one with decay and one without, give their states to one optimizer that has a
// group for each.
//
// Parameters may be plain tensors and DTensors, on several meshes; moments have their layouts. Does not communicate. A
// LossScaler takes it as it takes LibTorch's optimizers.
class FusedAdamW {
 public:
  // Throws std::invalid_argument on a parameter that is undefined or no leaf, that is listed twice, or that is plain
  // and whose memory has gaps, as that of a slice has, and on options that torch::optim::AdamW refuses. Make it after
  // parallelize_module.
  explicit FusedAdamW(const std::vector<at::Tensor>& parameters, const FusedAdamWOptions& options = {});

  // Updates the parameters that have a gradient.
  void step();
  // Zeroes the gradients in place, as a captured step needs, or drops them.
  void zero_grad(bool set_to_none = true);
  // Returns the parameters, those of one mesh and dtype together.
  std::vector<at::Tensor> parameters() const;
  // Changes the learning rate from the next step on, that of a graph's next replay too. Does not wait for the device.
  void set_lr(double lr);

  // Replaces the state and the options of those groups of `optimizer` that have the parameters here, in any order, by
  // these; its other groups stay. It shares the moments. Waits for the device, which has the counts of steps. Throws
  // std::invalid_argument, before anything changes, if a parameter is missing there, or has others in its group.
  void give_state(torch::optim::AdamW& optimizer) const;
  // Copies the state and the options of those groups of `optimizer` into these, at their addresses, which a captured
  // graph uses; of the options a graph that was captured before uses the learning rate alone. Throws
  // std::invalid_argument, before anything changes, as give_state does, if these groups have different options, or if
  // `amsgrad` is not as here.
  void take_state(const torch::optim::AdamW& optimizer);

 private:
  struct State {
    at::Tensor parameter, moment, square, largest, steps;  // `largest` with amsgrad alone
  };
  // Holds the parameters of one mesh, or the plain ones, that have one dtype.
  struct Group {
    std::vector<State> states;
    at::Tensor lr;  // a number on the parameters' device: float64 on the CPU, else float32
  };

  // Returns the addresses of the parameters.
  std::set<const void*> addresses() const;

  FusedAdamWOptions options_;
  std::vector<Group> groups_;
};

}  // namespace tessera

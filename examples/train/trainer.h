#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/data/global_batches.h"
#include "tessera/examples/train/options.h"
#include "tessera/examples/train/windows.h"
#include "tessera/mesh/device_mesh.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace train {

struct StepResult {
  // These two are float64, plain and the same on every rank, on the trainer's device: on a GPU reading one waits for
  // the step.
  at::Tensor loss;           // the mean over the global batch, in nats
  at::Tensor gradient_norm;  // before it was clipped
  double learning_rate = 0;
};

// Throws std::runtime_error, which names the step, when the loss or the norm of the gradients is not finite. Does not
// communicate.
void check_finite(const StepResult& result, int64_t step);

// Returns the dtype in which layers compute: options.dtype, with "auto" replaced by what the device is quick at.
std::string compute_dtype(const Options& options);
// Returns the learning rate of a step: it rises over the warm-up, then falls to a tenth along half a cosine.
double learning_rate_of(const Options& options, int64_t step);

// Holds a model and its optimizer, and trains it step by step: on a mesh and its device, or, without one, in LibTorch
// alone on options.device. All ranks of the mesh make the same calls.
class Trainer {
 public:
  // First values and dropout follow from options.seed; for a dry run the model is built in its shards, with other first
  // values. Throws as parallelize_module does.
  Trainer(const Options& options, std::optional<tessera::DeviceMesh> mesh);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  torch::nn::Module& module();
  torch::optim::Optimizer& optimizer();
  std::string plan() const;  // how the layers are cut, for printing

  // Computes the loss of the batch of `step` and its clipped gradients: this rank reads its samples alone.
  StepResult compute_gradients(const Windows& windows, const tessera::GlobalBatches& batches, int64_t step);
  // Does the same, and then a step of the optimizer, which communicates nothing. The parts of both are spans of the
  // World's recorder. On the CPU it does what check_finite does, on every rank, before the optimizer's step: the
  // parameters are then as they were. On a GPU nothing waits for the step, so check_finite is the caller's, and
  // parameters that are no longer finite stay so in later steps.
  StepResult step(const Windows& windows, const tessera::GlobalBatches& batches, int64_t step);

  // Returns the mean bits for each byte of `samples` of the windows, without dropout.
  double bits_per_byte(const Windows& windows, const std::vector<int64_t>& samples);

  // Returns `count` bytes that the model writes after `prompt`, drawn by its probabilities at `temperature`, which is
  // above 0.
  std::string write(const std::string& prompt, int64_t count, double temperature, uint64_t seed);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace train

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
  double loss = 0;           // the mean over the global batch, in nats, the same on every rank
  double gradient_norm = 0;  // before it was clipped
  double learning_rate = 0;
};

// Returns the dtype in which layers compute: options.dtype, with "auto" replaced by what this CPU is quick at.
std::string compute_dtype(const Options& options);
// Returns the learning rate of a step: it rises over the warm-up, then falls to a tenth along half a cosine.
double learning_rate_of(const Options& options, int64_t step);

// Holds a model and its optimizer, and trains it step by step: on a mesh, or, without one, in LibTorch alone. All ranks
// of the mesh make the same calls.
class Trainer {
 public:
  // First values and dropout follow from options.seed. Throws as parallelize_module does.
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
  // World's recorder. Throws std::runtime_error, on every
  // rank, when the loss or the norm of the gradients is not finite; the parameters are then as they were.
  StepResult step(const Windows& windows, const tessera::GlobalBatches& batches, int64_t step);

  // Returns the mean bits for each byte of `samples` of the windows, without dropout.
  double bits_per_byte(const Windows& windows, const std::vector<int64_t>& samples);

  // Returns `count` bytes that the model writes after `prompt`, drawn by its probabilities at `temperature`.
  std::string write(const std::string& prompt, int64_t count, double temperature, uint64_t seed);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace train

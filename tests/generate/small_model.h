#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/dtensor/io/training_state.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/mesh/device_mesh.h"

// Holds the model that the tests of generation share. Neither its vocabulary nor its heads are a multiple of 3.

inline TransformerOptions small_options() {
  return {.vocabulary = 29, .hidden = 16, .layers = 2, .heads = 4, .sequence = 16, .dropout = 0.1};
}

// Returns a plain model in evaluation mode, in float64, with values large enough for logits that differ. They are those
// of a float32 model, so that a checkpoint, which is float32, has them exactly.
inline Transformer small_model(const TransformerOptions& options) {
  torch::manual_seed(1);
  Transformer model(options);
  model->eval();
  const torch::NoGradGuard no_gradient;
  for (at::Tensor& p : model->parameters()) {
    if (p.dim() >= 2) p.mul_(10);
  }
  model->to(torch::kDouble);
  return model;
}

// Saves the values of a model in `dtype` as the training state of `step` in `folder`, in one process.
inline void save_small_model(Transformer& model, const std::string& folder, int64_t step,
                             at::ScalarType dtype = torch::kFloat) {
  model->to(dtype);
  const tessera::DeviceMesh alone = tessera::init_device_mesh("cpu", {1}, {"tp"}, tessera::World::fake(0, 1));
  tessera::save_training_state({.mesh = alone, .model = *model, .step = step}, folder);
  model->to(torch::kDouble);
}

// Returns how many of the 4 heads each rank has.
inline std::vector<int64_t> small_heads_of_ranks(int64_t ranks) {
  switch (ranks) {
    case 1: return {4};
    case 2: return {2, 2};
    case 3: return {2, 2, 0};
    case 4: return {1, 1, 1, 1};
    default: throw std::invalid_argument("the tests use 1 to 4 ranks");
  }
}

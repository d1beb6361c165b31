#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include <torch/torch.h>

#include "tessera/examples/language_model/transformer.h"

// Holds the model that the tests of generation share. Neither its vocabulary nor its heads are a multiple of 3.

inline TransformerOptions small_options() {
  return {.vocabulary = 29, .hidden = 16, .layers = 2, .heads = 4, .sequence = 16, .dropout = 0.1};
}

// Returns a plain model in evaluation mode, in float64, with values large enough for logits that differ.
inline Transformer small_model(const TransformerOptions& options) {
  torch::manual_seed(1);
  Transformer model(options);
  model->to(torch::kDouble);
  model->eval();
  const torch::NoGradGuard no_gradient;
  for (at::Tensor& p : model->parameters()) {
    if (p.dim() >= 2) p.mul_(10);
  }
  return model;
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

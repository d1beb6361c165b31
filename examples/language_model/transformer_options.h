#pragma once

#include <cstdint>
#include <string>

// Holds the sizes of the model of transformer.h, apart from it for programs that only read them.
struct TransformerOptions {
  int64_t vocabulary = 256;  // bytes
  int64_t hidden = 128;
  int64_t layers = 4;
  int64_t heads = 4;       // divides `hidden`
  int64_t sequence = 128;  // the longest
  double dropout = 0.1;
  bool tied = false;          // the output multiplies by the embedding's weight
  std::string gelu = "none";  // is torch::gelu's `approximate`; GPT-2's published weights need "tanh"

  friend bool operator==(const TransformerOptions&, const TransformerOptions&) = default;
};

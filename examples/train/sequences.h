#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <torch/torch.h>

#include "tessera/examples/train/transformer.h"

// Holds sequences that count upwards in steps of 1 to 5. A sample's target is the next word at each place.
struct Sequences : torch::data::datasets::Dataset<Sequences> {
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<int64_t>(index);
    const at::Tensor words = (torch::arange(kLength + 1) * (1 + i % 5) + i * 7) % kVocabulary;
    return {words.slice(0, 0, kLength), words.slice(0, 1, kLength + 1)};
  }
  std::optional<std::size_t> size() const override { return 96; }
};

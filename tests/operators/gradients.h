#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tessera/tests/operators/trials.h"
#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// What backward through a call gives its tensors. The gradients of its results are drawn, and on DTensors lie in
// placements that are drawn too, pending ones among them.
class Gradients {
 public:
  // Differentiates the call on plain tensors: all results by all tensors of real or complex numbers; where LibTorch
  // refuses that, the first result, or by those tensors for which it does not.
  Gradients(const WholeCall& call, uint64_t seed);

  bool differentiable() const { return !outputs_.empty(); }

  // The worst finding over the trials of the call. Numbers that are drawn are those of DTensors on one rank.
  Finding validate();

 private:
  using Tensors = std::vector<at::Tensor>;

  bool attempt(const std::vector<bool>& wanted, bool first_only);
  void choose();
  // The results, and what the call wrote.
  Tensors forward(const Tensors& leaves) const;
  // Forward and backward; adds the gradients of the leaves. Returns what is wrong.
  std::string differentiate(const Tensors& leaves, const Tensors& cotangents, Tensors& gradients) const;
  Finding validate(const Trial& trial, Tensors* reference);

  const WholeCall& call_;
  uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<bool> wanted_;          // by tensor: whether it requires a gradient
  std::vector<std::size_t> outputs_;  // of what forward gives, those that have one
  Tensors cotangents_;                // by output
  Tensors gradients_;                 // by tensor
};

}  // namespace tessera::testing

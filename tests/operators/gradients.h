#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tessera/tests/operators/trials.h"
#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Compares the gradients of a call on DTensors with those on plain tensors. The gradients of the results are random,
// and on DTensors have random placements, pending ones included.
class Gradients {
 public:
  // Differentiates the call on plain tensors: all results by all real or complex tensors. If LibTorch refuses that, it
  // tries the first result only, or those tensors for which LibTorch accepts it.
  Gradients(const WholeCall& call, uint64_t seed);

  bool differentiable() const { return !outputs_.empty(); }

  // Returns the worst finding over the trials of the call. Random results are compared with those of DTensors on one
  // rank.
  Finding validate();

 private:
  using Tensors = std::vector<at::Tensor>;

  bool attempt(const std::vector<bool>& wanted, bool first_only);
  void choose();
  // Returns the results and the tensors that the call wrote.
  Tensors forward(const Tensors& leaves) const;
  // Runs forward and backward and adds the leaves' gradients to `gradients`. Returns what is wrong.
  std::string differentiate(const Tensors& leaves, const Tensors& cotangents, Tensors& gradients) const;
  Finding validate(const Trial& trial, Tensors* reference);

  const WholeCall& call_;
  uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<bool> wanted_;          // [tensor]: whether it requires a gradient
  std::vector<std::size_t> outputs_;  // the results of forward() that have a gradient
  Tensors cotangents_;                // [output]
  Tensors gradients_;                 // [tensor]
};

}  // namespace tessera::testing

#pragma once

#include <string>
#include <string_view>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// How an operator is to be run on a mesh: as rules::Choice.
struct Layouts {
  std::vector<Placements> inputs;
  std::vector<Placements> outputs;
  std::string_view kernel;
};

// The arguments of the call on one rank's pieces of its tensors, where its first result is to have `sizes`: sizes,
// strides and counts among them are those of the pieces. Throws std::logic_error where the pieces hold a part of a
// group of channels.
torch::jit::Stack localized(const Prepared& sample, const std::vector<at::Tensor>& pieces,
                            const std::vector<int64_t>& sizes);

// Runs the sample as the ranks of a mesh would: cuts the inputs, runs the operator (or a stand-in for the local kernel)
// on every rank's pieces, puts the results together. Returns what is wrong, empty for nothing.
std::string simulate(const Prepared& sample, const Layouts& layouts, std::span<const int64_t> mesh_shape);

}  // namespace tessera::testing

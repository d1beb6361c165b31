#pragma once

#include <string>
#include <string_view>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Holds the placements for a run of an operator on a mesh, as rules::Choice does.
struct Layouts {
  std::vector<Placements> inputs;
  std::vector<Placements> outputs;
  std::string_view kernel;
};

// Returns the arguments of the call on one rank's pieces of its tensors, whose first result must have `sizes`. Sizes,
// strides and counts among the arguments are those of the pieces. Throws std::logic_error if the pieces hold a part of
// a group of channels.
torch::jit::Stack localized(const Prepared& sample, const std::vector<at::Tensor>& pieces,
                            const std::vector<int64_t>& sizes);

// Runs the sample as the ranks of a mesh would: cuts the inputs, runs the operator (or a stand-in for the local kernel)
// on every rank's pieces and joins the results. Returns what is wrong, or "".
std::string simulate(const Prepared& sample, const Layouts& layouts, std::span<const int64_t> mesh_shape);

}  // namespace tessera::testing

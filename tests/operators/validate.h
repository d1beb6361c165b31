#pragma once

#include <cstdint>
#include <vector>

#include "tessera/tests/operators/trials.h"
#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Says what a call's results are compared with.
enum class Comparable : uint8_t {
  kValues,     // those of plain tensors
  kDrawn,      // those that DTensors on one rank draw: an element's numbers do not depend on the mesh
  kUnrounded,  // those of plain tensors, except bits of a sum of terms, which show how it was rounded
  kSizes,      // nothing but sizes: the memory was never written
};
Comparable comparable(const WholeCall& call);

// Returns the worst finding over the trials of a call (trials.h). It compares the results, those that are no tensors
// too, and the tensors that the call writes. The terms of pending tensors differ in size and sign.
Finding validate_layouts(const WholeCall& call, uint64_t seed);

}  // namespace tessera::testing

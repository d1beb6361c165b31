#pragma once

#include <cstdint>
#include <vector>

#include "tessera/tests/operators/trials.h"
#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// How much of a call's results can be compared with what the same call gives elsewhere.
enum class Comparable : uint8_t {
  kValues,     // with those of plain tensors
  kDrawn,      // with those that DTensors on one rank draw: an element's numbers do not depend on the mesh
  kUnrounded,  // with those of plain tensors, but for the bits of a sum of terms: what looks at bits sees its rounding
  kSizes,      // memory that nobody has written
};
Comparable comparable(const WholeCall& call);

// The worst finding over the trials of a call (trials.h): the results, what is no tensor too, and the tensors that it
// writes. The terms of pending tensors differ in size and sign.
Finding validate_layouts(const WholeCall& call, uint64_t seed);

}  // namespace tessera::testing

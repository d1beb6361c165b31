#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/placement/placement.h"
#include "tessera/tests/ops_rules/sample.h"

namespace tessera::testing {

// What became of a call on DTensors beside the same call on plain tensors, from the best to the worst.
enum class Verdict : uint8_t {
  kByRule,      // the same results; no input was brought to Replicate for want of a rule
  kReplicated,  // the same results, by replicating somewhere
  kRefused,     // an error, on every rank alike
  kWrong,       // other results
};

struct Finding {
  Verdict verdict = Verdict::kByRule;
  std::string text;  // what was wrong or refused, with the layouts
};

// Runs a call in the in-process world, its tensors in the placements given, and compares the results, what is no tensor too, and
// the tensors that it writes. The terms of pending tensors differ in size and sign.
Finding validate(const WholeCall& call, const std::vector<Placements>& layouts, const std::vector<int64_t>& mesh_shape);

// The worst finding over meshes of 2, 3 and 4 ranks in one dimension and {2, 2}: the first tensor in every placement, then all tensors in
// placements drawn from `seed`; pieces are uneven, and some empty.
Finding validate_layouts(const WholeCall& call, uint64_t seed);

}  // namespace tessera::testing

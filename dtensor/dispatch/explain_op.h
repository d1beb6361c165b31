#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include "tessera/placement/placement.h"

namespace tessera {

// What one mesh dimension might do for an operator.
struct OpCandidate {
  std::size_t mesh_dim;
  std::vector<Placement> inputs;   // one a tensor argument, lists flattened, in schema order
  std::vector<Placement> outputs;  // one a tensor result
  double microseconds;             // estimated, to bring the inputs there
  std::string refused;             // why it cannot be; "" where it can
  bool chosen = false;
};

// How an operator would run: each mesh dimension, outermost first, takes the candidate that costs least of those that
// can be; of equal ones the first, and the candidates stand in the order that counts: everything replicated, then the
// rule's.
struct OpExplanation {
  std::string op;
  bool by_rule = false;  // else every input is brought to Replicate
  std::vector<OpCandidate> candidates;
  std::vector<Placements> inputs;   // into which the tensors are brought; what is no DTensor has none
  std::vector<Placements> outputs;  // empty where only running the operator tells
  std::vector<std::string> steps;   // the redistributions

  std::string to_string() const;
};
std::ostream& operator<<(std::ostream& out, const OpExplanation& explanation);

// What the operator, "aten::mm" or "aten::add.Tensor", would do with these arguments in schema order; those left out
// take their defaults.
//
//   std::cout << explain_op("aten::mm", {x, w});
//
// Nothing runs and nothing is communicated; the same on every rank. Throws std::invalid_argument on a name that is
// none, on an operator that LibTorch or this library writes in others (explain those) or that takes lists piece by
// piece, and what the operator throws. What a style's contract does to a call is not in it.
OpExplanation explain_op(const std::string& op, std::vector<c10::IValue> args);

}  // namespace tessera

#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include "tessera/placement/placement.h"

namespace tessera {

// Describes one strategy that was considered for one mesh dimension.
struct OpCandidate {
  std::size_t mesh_dim;
  std::vector<Placement> inputs;   // one per tensor argument, lists flattened, in schema order
  std::vector<Placement> outputs;  // one per tensor result
  double microseconds;             // estimated time to redistribute the inputs, and see rules::choose
  std::string refused;             // why it cannot be used; "" if it can
  bool chosen = false;
};

// Explains how an operator would run. Each mesh dimension, outermost first, takes the candidate of least cost that can
// be used; of equal ones the first in the list, which begins with everything replicated and goes on with the rule's
// strategies.
struct OpExplanation {
  std::string op;
  bool by_rule = false;  // false: every input is redistributed to Replicate
  std::vector<OpCandidate> candidates;
  std::vector<Placements> inputs;   // what the tensors are redistributed to; empty for plain ones
  std::vector<Placements> outputs;  // empty if only running the operator shows them
  std::vector<std::string> steps;   // the redistributions and what a kernel communicates, in words

  std::string to_string() const;
};
std::ostream& operator<<(std::ostream& out, const OpExplanation& explanation);

// Explains what the operator, for example "aten::mm" or "aten::add.Tensor", would do with these arguments, given in
// schema order; omitted ones have their defaults.
//
//   std::cout << explain_op("aten::mm", {x, w});
//
// Nothing runs and nothing is communicated; the result is the same on every rank. What a style's contract does to a
// call is not included. Throws std::invalid_argument on an unknown name, on an operator that LibTorch or this library
// runs as other operators (explain those) or that works on the pieces of lists, and what the operator itself throws.
OpExplanation explain_op(const std::string& op, std::vector<c10::IValue> args);

}  // namespace tessera

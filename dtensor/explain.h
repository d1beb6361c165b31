#pragma once

#include <iosfwd>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"

namespace tessera {

// Describes what a redistribution would do: its plan, compared with a lower bound on any plan's bytes and with a plan
// that gathers everything.
struct Explanation {
  std::string tensor;  // "Float [4, 8] on {tp: 2} on cpu as [S(0)]"
  Plan plan;
  LowerBound lower_bound;
  Plan gather_everything;  // to Replicate on every mesh dimension, then to the placements

  // Lists the steps, then a table of the bytes received (by the rank that receives most in each step, and by all
  // ranks), the bytes live at once and the time, of this plan, the lower bound and gathering everything.
  std::string to_string() const;
};
std::ostream& operator<<(std::ostream& out, const Explanation& explanation);

// Returns what redistribute(dtensor, placements, {.cost_model = model}) would do. Does not communicate; the result is
// the same on every rank. Throws as redistribute.
Explanation explain(const at::Tensor& dtensor, const Placements& placements, const CostModel& model = {});

}  // namespace tessera

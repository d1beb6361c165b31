#pragma once

#include <iosfwd>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"

namespace tessera {

// What a redistribution would do, before it runs: its plan, beside what no plan can save, and beside gathering
// everything.
struct Explanation {
  std::string tensor;  // "Float [4, 8] on {tp: 2} on cpu as [S(0)]"
  Plan plan;
  LowerBound lower_bound;
  Plan gather_everything;  // to Replicate on every mesh dimension, and from there

  // The steps, then bytes received (by the rank that receives most in each step, and by all), live bytes and time of
  // each.
  std::string to_string() const;
};
std::ostream& operator<<(std::ostream& out, const Explanation& explanation);

// What redistribute(dtensor, placements, {.cost_model = model}) would do. No communication; the same on every rank.
// Throws as redistribute.
Explanation explain(const at::Tensor& dtensor, const Placements& placements, const CostModel& model = {});

}  // namespace tessera

#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera::bench {

using Pair = std::pair<Placements, Placements>;
using Sizes = std::vector<int64_t>;

struct NamedModel {
  std::string name;
  CostModel model;
};
// The tensors here have some hundred bytes, so for the measured models latency is all. The made-up ones let bytes weigh
// as much as steps do, and alone.
std::vector<NamedModel> models(const Mesh& mesh);

// Replicate, Shards of two tensor dimensions, Partial; these and other kinds that may fit `ranks` of a mesh dimension.
std::vector<Placement> plain_choices();
std::vector<Placement> all_choices(int64_t ranks, const Sizes& shape);

// A ragged cut, and one by interval lists, over all mesh dimensions together.
std::vector<Placements> joint_layouts(const Mesh& mesh, const Sizes& shape);

// All combinations, one a mesh dimension, and `more`, those that are a layout.
std::vector<Placements> layouts(const Mesh& mesh, const Sizes& shape,
                                const std::function<std::vector<Placement>(int64_t)>& choices_of,
                                const std::vector<Placements>& more = {});
// All pairs, or `most` drawn by `seed`.
std::vector<Pair> pairs(const std::vector<Placements>& layouts, std::size_t most, uint64_t seed);

// Of what a plan costs to what it could: where that is nothing, a plan that costs is counted apart.
class Ratios {
 public:
  void add(double cost, double least);
  double geomean() const { return count_ ? std::exp(sum_of_logs_ / static_cast<double>(count_)) : 1; }
  double worst() const { return worst_; }
  int64_t for_nothing() const { return for_nothing_; }

 private:
  int64_t count_ = 0;
  int64_t for_nothing_ = 0;
  double sum_of_logs_ = 0;
  double worst_ = 1;
};

}  // namespace tessera::bench

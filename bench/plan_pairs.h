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
// Returns the cost models. The tensors here have some hundred bytes, so in the measured models only latency counts. Two
// models are invented: in "balanced" bytes cost about as much as steps, and in "bandwidth" only bytes count.
std::vector<NamedModel> models(const Mesh& mesh);

// plain_choices() returns Replicate, Shards of two tensor dimensions and Partial. all_choices() adds other kinds for a
// mesh dimension of `ranks` ranks.
std::vector<Placement> plain_choices();
std::vector<Placement> all_choices(int64_t ranks, const Sizes& shape);
// The plain ones and a ragged cut, and with_lists also block-cyclic and interval lists.
std::vector<Placement> uneven_choices(int64_t ranks, const Sizes& shape, bool with_lists);

// Returns a ragged partition and one by interval lists, each over all mesh dimensions together.
std::vector<Placements> joint_layouts(const Mesh& mesh, const Sizes& shape);

// Returns the valid layouts among all combinations of one choice per mesh dimension, and among `more`.
std::vector<Placements> layouts(const Mesh& mesh, const Sizes& shape,
                                const std::function<std::vector<Placement>(int64_t)>& choices_of,
                                const std::vector<Placements>& more = {});
// Returns all pairs, or `most` random ones, drawn with `seed`, if there are more. With `most` 0 it returns all.
std::vector<Pair> pairs(const std::vector<Placements>& layouts, std::size_t most, uint64_t seed);
// `count` pairs drawn by `seed` where the layouts are too many to list. The target has the source's placement on each
// mesh dimension with probability one half.
std::vector<Pair> drawn_pairs(const Mesh& mesh, const Sizes& shape,
                              const std::function<std::vector<Placement>(int64_t)>& choices_of, std::size_t count,
                              uint64_t seed);

// Collects ratios of a plan's cost to the least possible cost. If the latter is 0, a plan that costs something is
// counted separately.
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

#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/cost_model.h"
#include "tessera/placement/planner/layout_space.h"

namespace tessera {

// Describes one step between two layouts and what it costs.
struct Step {
  PlanStep::Kind kind = PlanStep::Kind::kLocal;
  uint32_t mesh_dims = 0;  // a bit for each
  double bytes = 0;        // received by the rank that receives most
  double peak = 0;         // live at the rank that has most
  double microseconds = 0;
};

// Computes the steps between the layouts of a space and their costs; see plan_redistribute. An object serves one search
// and is not thread-safe.
class StepCosts {
 public:
  using Node = LayoutSpace::Node;

  // `space` must outlive this object.
  StepCosts(LayoutSpace& space, at::ScalarType dtype, const CostModel& model);

  // Says whether a step may exist, judged only by what is pending and what is cut. A step does not reduce and form
  // Partials at once, and a step that does one of these moves no other elements.
  bool is_possible(Node from, Node to) const {
    const uint32_t reduced = space_.pending(from) & ~space_.pending(to);
    const uint32_t becomes_pending = space_.pending(to) & ~space_.pending(from);
    if ((reduced | becomes_pending) == 0) return true;
    return (reduced == 0 || becomes_pending == 0) && (counts_.dropped_cuts(from, to) & ~becomes_pending) == 0;
  }
  // Returns the cheapest step from one layout to another whose live bytes are within live_limit(), if there is one that
  // takes at most `limit` microseconds.
  std::optional<Step> step(Node from, Node to, double limit);
  // Returns a lower bound on the microseconds of every path from `node` to the target.
  double bound(Node node);
  // Returns the bytes that a step may have live. Unless it is set, this is the source tile, the target tile and twice
  // the larger of them.
  double live_limit() const { return live_limit_; }
  void set_live_limit(double bytes) { live_limit_ = bytes; }
  // Returns an upper bound on the live bytes of a step that moves elements.
  double most_live(Node from, Node to) const;
  // Says whether all mesh dimensions of size above 1 have the same link.
  bool equal_links() const { return equal_links_; }
  // Returns the largest latency and the smallest bandwidth of these mesh dimensions.
  const Link& slowest(uint32_t mesh_dims) const { return links_[mesh_dims]; }

 private:
  // Says how a step changes the placements of mesh dimensions.
  struct Changes {
    uint32_t reduced = 0;   // a Partial becomes another placement
    uint32_t embedded = 0;  // a Shard becomes a Partial
    uint32_t formed = 0;    // Replicate becomes a Partial
  };
  double memory_limit() const;
  void make_links();
  std::optional<Step> find_step(Node from, Node to, double limit);
  Changes changes(Node from, Node to) const;
  std::optional<Step> reduction(Node from, Node to, const Changes& change, double limit);
  Step whole_reduction(Node from, Node to, const Changes& change, double limit);
  // Gives the elements that ranks receive from ranks that differ from them along some mesh dimensions; see
  // CostModel::microseconds.
  using Received = c10::function_ref<double(uint32_t)>;
  // Says whether a step over these mesh dimensions in which a rank receives so many elements takes more than `limit`
  // microseconds.
  bool is_dearer(uint32_t mesh_dims, Received received, double limit) const {
    return priced(PlanStep::Kind::kAllToAll, mesh_dims, received, limit).microseconds > limit;
  }
  // Says whether all mesh dimensions of more than one rank are among `some`.
  bool is_every(uint32_t some) const { return counts_.ranks().ranks_of(counts_.ranks().every() & ~some) == 1; }
  Step move(Node from, Node to, const ElementCounts::Needs& needs, double limit);
  // Returns how many of the other ranks of a group along `mesh_dims` differ from a rank along `some` mesh dimensions.
  double other_ranks(uint32_t mesh_dims, uint32_t some) const {
    const ComparedRanks& ranks = counts_.ranks();
    return static_cast<double>(ranks.ranks_of(mesh_dims) - ranks.ranks_of(mesh_dims & ~some));
  }
  // Returns a lower bound on the elements that the rank that receives most receives, on every path to the target.
  double most_received(Node node);
  // Returns a lower bound on the elements that a rank receives on average in steps over some of `mesh_dims`, on every
  // path to the target.
  double least_over(Node node, uint32_t mesh_dims);
  // Returns the step without what is live. Where it takes more than `limit` microseconds, the time may lack the part of
  // the faster links.
  Step priced(PlanStep::Kind kind, uint32_t mesh_dims, Received received,
              double limit = std::numeric_limits<double>::infinity()) const;
  double find_bound(Node node);

  const LayoutSpace& space_;
  ElementCounts& counts_;
  const double element_size_;
  double live_limit_ = 0;
  const bool scales_;  // pieces may be multiplied by a number of ranks; float16 could overflow
  CostModel model_;    // mesh dimensions of one rank cost nothing in it
  bool equal_links_ = true;
  std::vector<Link> links_;  // [mesh dimensions as bits]: the largest latency and the smallest bandwidth
  // Describes one bandwidth: lists the mesh dimensions that are no faster, and has the least latency among them. There
  // is one level per bandwidth of a mesh dimension; the fastest is first.
  struct Level {
    double bytes_per_microsecond = 0;
    double microseconds = 0;
    uint32_t mesh_dims = 0;
  };
  std::vector<Level> levels_;
  std::vector<double> bounds_;  // [node]; negative: not computed
};

}  // namespace tessera

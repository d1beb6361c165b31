#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/cost_model.h"
#include "tessera/placement/planner/layout_space.h"

namespace tessera {

// One step between two layouts and what it costs.
struct Step {
  PlanStep::Kind kind = PlanStep::Kind::kLocal;
  uint32_t mesh_dims = 0;  // a bit for each
  double bytes = 0;        // received by the rank that receives most
  double peak = 0;         // live at the rank that has most
  double microseconds = 0;
};

// The steps between the layouts of a space and their costs: see plan_redistribute. Made for one search; not
// thread-safe.
class StepCosts {
 public:
  using Node = LayoutSpace::Node;

  // `space` must outlive this.
  StepCosts(LayoutSpace& space, at::ScalarType dtype, const CostModel& model);

  // Whether there may be a step, by what is pending and cut alone: none reduces and forms; and one that does either
  // moves no elements but what it reduces.
  bool is_possible(Node from, Node to) const {
    const uint32_t reduced = space_.pending(from) & ~space_.pending(to);
    const uint32_t formed = space_.pending(to) & ~space_.pending(from);
    if ((reduced | formed) == 0) return true;
    return (reduced == 0 || formed == 0) && (space_.dropped_cuts(from, to) & ~formed) == 0;
  }
  // The cheapest step from one layout to another with no more live bytes than live_limit(), if one does it in less than
  // `limit` microseconds.
  std::optional<Step> step(Node from, Node to, double limit);
  // What every way from `node` to the target costs at least.
  double bound(Node node);
  // Bytes that a step may have live; source and target tile of the space, and twice the larger, until another is set.
  double live_limit() const { return live_limit_; }
  void set_live_limit(double bytes) { live_limit_ = bytes; }
  // What a step that moves elements has live at most, in bytes.
  double most_live(Node from, Node to) const;
  // Whether all mesh dimensions of several ranks have the same link.
  bool equal_links() const { return equal_links_; }
  // The slowest link of those.
  const Link& slowest(uint32_t mesh_dims) const { return links_[mesh_dims]; }

 private:
  // Of the mesh dimensions whose placement a step changes, what becomes of them.
  struct Changes {
    uint32_t reduced = 0;   // a Partial becomes none
    uint32_t embedded = 0;  // a Shard becomes a Partial
    uint32_t formed = 0;    // Replicate becomes a Partial
  };
  double memory_limit() const;
  void make_links();
  std::optional<Step> find_step(Node from, Node to, double limit);
  Changes changes(Node from, Node to) const;
  std::optional<Step> reduction(Node from, Node to, const Changes& change, double limit);
  Step whole_reduction(Node from, Node to, const Changes& change, double limit);
  // Whether a move over these mesh dimensions of ranks that lack so many elements takes more than `limit` microseconds.
  bool is_dearer(uint32_t mesh_dims, int64_t elements, double limit) const {
    return priced(PlanStep::Kind::kAllToAll, mesh_dims, static_cast<double>(elements)).microseconds > limit;
  }
  Step move(Node from, Node to, const LayoutSpace::Needs& needs);
  struct Missing {
    int64_t most = 0;  // elements, of any rank
    int64_t live = 0;  // of both tiles, and twice what a rank lacks
  };
  Missing missing(Node from, Node to);
  // Fills have_ and get_.
  void look_at(Node from, Node to);
  // Bytes live at most where a rank receives `received` times its target tile.
  double live(Node from, Node to, double received);
  // Elements that the rank that receives most does at least, on every way to the target.
  double most_received(Node node);
  // Elements that a rank receives at least, on the average, in steps over some of `mesh_dims`, on every way to the
  // target.
  double least_over(Node node, uint32_t mesh_dims);
  Step priced(PlanStep::Kind kind, uint32_t mesh_dims, double elements) const;
  double find_bound(Node node);

  LayoutSpace& space_;
  const double element_size_;
  double live_limit_ = 0;
  const bool scales_;  // pieces may be multiplied by a number of ranks: in half they might overflow
  const CostModel model_;
  bool equal_links_ = true;
  std::vector<Link> links_;  // by mesh dimensions: the slowest
  // The mesh dimensions of at most a bandwidth, and the least latency of these; the fastest first.
  struct Level {
    double bytes_per_microsecond = 0;
    double microseconds = 0;
    uint32_t mesh_dims = 0;
  };
  std::vector<Level> levels_;
  std::vector<double> bounds_;  // by node; negative: not known
  // Scratch, for each compared rank: elements that it has, is to have, and both.
  std::vector<int64_t> have_, get_, common_;
  Node have_of_ = -1;
};

}  // namespace tessera

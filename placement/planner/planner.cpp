// This file holds the search of plan_redistribute.
#include <algorithm>
#include <bit>
#include <limits>
#include <queue>
#include <stdexcept>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/layout_space.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/placement/planner/step_costs.h"
#include "tessera/placement/planner/step_groups.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

using Node = LayoutSpace::Node;

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kSlack = 1e-12;  // relative, for rounding errors in times

// Compares by time, where a difference of rounding alone counts as equal; then by the number of steps that communicate,
// by the mesh dimensions over which they do, and by the number of steps.
struct Cost {
  double microseconds = 0;
  int messages = 0;
  int mesh_dims = 0;
  int steps = 0;

  friend bool operator<(const Cost& a, const Cost& b) {
    const double slack = kSlack * std::min(a.microseconds, b.microseconds);  // finite if one of the two is
    if (a.microseconds < b.microseconds - slack) return true;
    if (a.microseconds > b.microseconds + slack) return false;
    return std::tie(a.messages, a.mesh_dims, a.steps) < std::tie(b.messages, b.mesh_dims, b.steps);
  }
};

// Returns `cost` with one more step.
Cost after(const Cost& cost, const Step& step) {
  return {.microseconds = cost.microseconds + step.microseconds,
          .messages = cost.messages + (step.kind == PlanStep::Kind::kLocal ? 0 : 1),
          .mesh_dims = cost.mesh_dims + std::popcount(step.mesh_dims),
          .steps = cost.steps + 1};
}

// Returns what may be added to the time of `cost` so that it stays less than `other`.
double most_before(const Cost& other, const Cost& cost) {
  if (other.microseconds == kNever) return kNever;  // a link so slow that the time overflowed
  const bool wins_tie =
      std::tie(cost.messages, cost.mesh_dims, cost.steps) < std::tie(other.messages, other.mesh_dims, other.steps);
  return other.microseconds - cost.microseconds + (wins_tie ? kSlack : -kSlack) * other.microseconds;
}

// Runs A* over the layouts of a space.
class PathSearch {
 public:
  PathSearch(LayoutSpace& space, StepCosts& costs)
      : space_(space), costs_(costs), seen_(static_cast<std::size_t>(space.size())) {}

  // Returns the nodes of the cheapest path, or nothing if there is none.
  std::vector<Node> run() {
    reach(space_.from(), {}, -1);
    while (!open_.empty()) {
      const Open next = open_.top();
      open_.pop();
      Seen& at = seen(next.node);
      if (at.done) continue;
      at.done = true;
      if (next.node == space_.to()) return path_to(next.node);
      expand(next.node, at.cost);
    }
    return {};
  }

 private:
  struct Seen {
    Cost cost;
    Node before = -1;
    bool kept = false;  // the step from `before` to this node changes nothing that is pending
    bool reached = false;
    bool done = false;
  };
  struct Open {
    Cost least;  // a lower bound on a path through the node
    Node node;
    friend bool operator<(const Open& a, const Open& b) {  // for a heap with the cheapest on top
      if (b.least < a.least) return true;
      if (a.least < b.least) return false;
      return a.node > b.node;
    }
  };

  Seen& seen(Node node) { return seen_[static_cast<std::size_t>(node)]; }

  // Returns a lower bound on the cost of a path to the target that reaches `node` at `cost`.
  Cost least_through(Node node, Cost cost) {
    if (node == space_.to()) return cost;
    const double bound = costs_.bound(node);
    cost.microseconds += bound;
    cost.messages += bound > 0 ? 1 : 0;
    cost.mesh_dims += bound > 0 ? 1 : 0;
    ++cost.steps;
    return cost;
  }

  void reach(Node node, const Cost& cost, Node before) {
    const bool kept = before >= 0 && keeps_pending(before, node);
    seen(node) = {.cost = cost, .before = before, .kept = kept, .reached = true, .done = false};
    open_.push({.least = least_through(node, cost), .node = node});
  }

  void expand(Node node, const Cost& cost) {
    // The target comes first, since its cost bounds the others.
    step(node, space_.to(), cost);
    for (Node next = 0; next < space_.size(); ++next) {
      if (next != node && next != space_.to()) step(node, next, cost);
    }
  }

  bool keeps_pending(Node node, Node next) const {
    return space_.pending(node) == space_.pending(next) &&
           (space_.changed_partials(node, next) | space_.rescaled(node, next)) == 0;
  }

  // Where links are equal, two successive steps that change nothing pending are no better than one step over all their
  // mesh dimensions, in which no rank receives more than in the two.
  bool is_detour(Node node, Node next) {
    if (!costs_.equal_links() || !seen(node).kept || !keeps_pending(node, next)) return false;
    return costs_.most_live(seen(node).before, next) <= costs_.live_limit();
  }

  void step(Node node, Node next, const Cost& cost) {
    const Seen& there = seen(next);
    if (there.reached && !(cost < there.cost)) return;
    if (!costs_.is_possible(node, next) || is_detour(node, next)) return;
    const bool ends = next == space_.to();
    const Seen& target = seen(space_.to());
    Cost arrival = cost;
    ++arrival.steps;
    if (!ends && target.reached && !(least_through(next, arrival) < target.cost)) return;
    // A step that communicates may take this long if the path through it is to be the best so far.
    const Cost soonest = after(cost, {.kind = PlanStep::Kind::kAllToAll, .mesh_dims = 1});
    double most = there.reached ? most_before(there.cost, soonest) : kNever;
    if (target.reached) most = std::min(most, most_before(target.cost, least_through(next, soonest)));
    const std::optional<Step> step = costs_.step(node, next, most);
    if (!step) return;
    arrival = after(cost, *step);
    if (there.reached && !(arrival < there.cost)) return;
    if (!ends && target.reached && !(least_through(next, arrival) < target.cost)) return;
    reach(next, arrival, node);
  }

  std::vector<Node> path_to(Node node) {
    std::vector<Node> path;
    for (Node at = node; at >= 0; at = seen(at).before) path.push_back(at);
    std::reverse(path.begin(), path.end());
    return path;
  }

  LayoutSpace& space_;
  StepCosts& costs_;
  std::vector<Seen> seen_;
  std::priority_queue<Open> open_;
};

// Returns the nodes of the cheapest path: the single step if nothing can be cheaper, and else what the search finds,
// within the limit of live bytes if that is possible.
std::vector<Node> find_path(LayoutSpace& space, StepCosts& costs) {
  const std::vector<Node> direct = {space.from(), space.to()};
  const std::optional<Step> step = costs.step(space.from(), space.to(), kNever);
  if (step && step->microseconds <= costs.bound(space.from())) return direct;
  space.grow();
  std::vector<Node> path = PathSearch(space, costs).run();
  if (!path.empty()) return path;
  costs.set_live_limit(kNever);
  return PathSearch(space, costs).run();
}

std::vector<int64_t> dims_of(uint32_t bits) {
  std::vector<int64_t> out;
  for (int64_t i = 0; bits >> i != 0; ++i) {
    if (((bits >> i) & 1) != 0) out.push_back(i);
  }
  return out;
}

// Replaces each masked reduction by the one without a mask.
Placements without_masks(Placements placements) {
  for (Placement& p : placements) {
    if (p.is_partial() && p.reduction().unmasked()) p = Partial(p.reduction().unmasked());
  }
  return placements;
}

// Makes every placement on a mesh dimension of size 1 Replicate: the piece is the value there, whatever its placement.
// Only a reduction that defines its own terms is different, and stays.
Placements replicate_on_size_one(Placements placements, const std::vector<int64_t>& mesh_shape) {
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const Placement& p = placements[i];
    const bool plain =
        !p.is_partial() || &p.reduction() == plain_reduction(p.reduction().op()).get() || p.is_partial(ReduceOp::kAvg);
    if (mesh_shape[i] == 1 && plain) placements[i] = Replicate();
  }
  return placements;
}

PlanStep step_of(LayoutSpace& space, StepCosts& costs, Node from, Node to, const Step& found) {
  PlanStep step{.kind = found.kind,
                .mesh_dims = dims_of(found.mesh_dims),
                .from = space.placements_of(from),
                .to = space.placements_of(to),
                .max_bytes = static_cast<int64_t>(found.bytes + 0.5),
                .peak_bytes = static_cast<int64_t>(found.peak + 0.5),
                .microseconds = found.microseconds};
  if (step.kind == PlanStep::Kind::kAllToAll) {
    const uint32_t shared = shared_mesh_dims(space, costs, from, to, found.mesh_dims);
    step.mesh_dims = dims_of(shared);
    if (permutes(space, from, to, shared)) step.kind = PlanStep::Kind::kPermute;
  }
  return step;
}

// Holds a redistribution and the model that gives its steps their times.
struct Problem {
  const std::vector<int64_t>& shape;
  at::ScalarType dtype;
  const std::vector<int64_t>& mesh_shape;
  const Placements& from;
  const Placements& to;
  const CostModel& model;
};

// Returns the step with the figures of all ranks, after a search saw it on some of them. A step that exists on some
// ranks exists on all, over the same mesh dimensions or fewer. Its live bytes may be above the limit on ranks that the
// search did not see.
PlanStep counted(const Problem& problem, const PlanStep& seen, double live_limit) {
  LayoutSpace space(problem.shape, problem.mesh_shape, seen.from, seen.to, /*sample=*/false);
  StepCosts costs(space, problem.dtype, problem.model);
  costs.set_live_limit(live_limit);
  std::optional<Step> found = costs.step(space.from(), space.to(), kNever);
  if (!found) {
    costs.set_live_limit(kNever);
    found = costs.step(space.from(), space.to(), kNever);
  }
  return step_of(space, costs, space.from(), space.to(), found.value());
}

// Returns the steps of the plan that is the cheapest on the compared ranks.
std::vector<PlanStep> find_steps(const Problem& problem) {
  LayoutSpace space(problem.shape, problem.mesh_shape, problem.from, problem.to, /*sample=*/true);
  StepCosts costs(space, problem.dtype, problem.model);
  const std::vector<Node> path = find_path(space, costs);
  if (path.empty()) {
    throw std::logic_error(
        fmt::format("plan_redistribute: no way from {} to {}", to_string(problem.from), to_string(problem.to)));
  }
  std::vector<PlanStep> steps;
  for (std::size_t i = 0; i + 1 < path.size(); ++i) {
    PlanStep step = step_of(space, costs, path[i], path[i + 1], *costs.step(path[i], path[i + 1], kNever));
    const bool exact = space.counts().is_exact(path[i], path[i + 1]) &&
                       (costs.equal_links() || space.counts().is_exact_across(path[i], path[i + 1]));
    steps.push_back(exact ? std::move(step) : counted(problem, step, costs.live_limit()));
  }
  return steps;
}

void check_ends(const std::vector<int64_t>& shape, at::ScalarType dtype, const Mesh& mesh,
                const Placements& placements) {
  if (mesh.ndim() > static_cast<int64_t>(kMostMeshDims)) {
    throw std::invalid_argument(
        fmt::format("plan_redistribute: a mesh of {} dimensions; merge some, at most {} are planned for", mesh.ndim(),
                    kMostMeshDims));
  }
  check_layout(placements, mesh, shape, "plan_redistribute");
  check_partials(placements, dtype, "plan_redistribute");
}

}  // namespace

Plan plan_redistribute(const std::vector<int64_t>& shape, at::ScalarType dtype, const Mesh& mesh,
                       const Placements& from, const Placements& to, const CostModel& model) {
  check_shape(shape, "plan_redistribute");
  const auto ndim = static_cast<int64_t>(shape.size());
  const Placements source = normalize(from, mesh, ndim, "plan_redistribute");
  const Placements target = normalize(to, mesh, ndim, "plan_redistribute");
  check_ends(shape, dtype, mesh, source);
  check_ends(shape, dtype, mesh, target);
  const CostModel costs = model.links.empty() ? CostModel::gloo(mesh.ndim()) : model;
  check_cost_model(costs, mesh.ndim(), "plan_redistribute");
  const Placements begin = replicate_on_size_one(without_masks(source), mesh.shape());
  const Placements end = replicate_on_size_one(without_masks(target), mesh.shape());
  if (begin == end) return Plan(mesh, shape, dtype, {});
  const Problem problem{
      .shape = shape, .dtype = dtype, .mesh_shape = mesh.shape(), .from = begin, .to = end, .model = costs};
  return Plan(mesh, shape, dtype, find_steps(problem));
}

}  // namespace tessera

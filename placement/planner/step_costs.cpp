#include "tessera/placement/planner/step_costs.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "tessera/placement/planner/byte_bounds.h"

namespace tessera {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

uint32_t bit(std::size_t mesh_dim) { return uint32_t{1} << mesh_dim; }

}  // namespace

StepCosts::StepCosts(LayoutSpace& space, at::ScalarType dtype, const CostModel& model)
    : space_(space),
      counts_(space.counts()),
      element_size_(static_cast<double>(c10::elementSize(dtype))),
      scales_(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || c10::isComplexType(dtype)),
      model_(model) {
  live_limit_ = memory_limit();
  make_links();
  const Link& all = links_.back();
  const std::vector<int64_t>& sizes = counts_.ranks().mesh_shape;
  for (std::size_t fastest_dim = 0; fastest_dim < sizes.size(); ++fastest_dim) {
    if (sizes[fastest_dim] == 1) continue;
    const Link& fastest = model_.links[fastest_dim];
    Level level{.bytes_per_microsecond = fastest.bytes_per_microsecond, .microseconds = kNever, .mesh_dims = 0};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const Link& link = model_.links[i];
      equal_links_ = equal_links_ && (sizes[i] == 1 || link == all);
      if (sizes[i] == 1 || link.bytes_per_microsecond > level.bytes_per_microsecond) continue;
      level.mesh_dims |= bit(i);
      level.microseconds = std::min(level.microseconds, link.microseconds);
    }
    const auto same = [&](const Level& other) { return other.mesh_dims == level.mesh_dims; };
    if (std::ranges::none_of(levels_, same)) levels_.push_back(level);
  }
  std::ranges::sort(levels_, std::greater(), &Level::bytes_per_microsecond);
}

double StepCosts::memory_limit() const {
  const auto source = static_cast<double>(counts_.largest(space_.from()));
  const auto target = static_cast<double>(counts_.largest(space_.to()));
  return element_size_ * (source + target + 2 * std::max(source, target));
}

// ---- steps ----------------------------------------------------------------------------------------------------------

StepCosts::Changes StepCosts::changes(Node from, Node to) const {
  const uint32_t becomes_pending = space_.pending(to) & ~space_.pending(from);
  return {.reduced = space_.pending(from) & ~space_.pending(to),
          .embedded = becomes_pending & space_.sharded(from),
          .formed = becomes_pending & space_.replicated(from)};
}

std::optional<Step> StepCosts::step(Node from, Node to, double limit) {
  std::optional<Step> out = find_step(from, to, limit);
  if (out && out->peak > live_limit_) out.reset();
  return out;
}

std::optional<Step> StepCosts::find_step(Node from, Node to, double limit) {
  if (!is_possible(from, to)) return std::nullopt;
  const Changes change = changes(from, to);
  if (space_.changed_partials(from, to) != 0)
    return std::nullopt;  // only linear reductions become one another in one step
  if (!scales_ && space_.scaled(to, change.embedded) != 0) return std::nullopt;
  const bool rescales = space_.rescaled(from, to) != 0;
  if (change.reduced != 0) return rescales ? std::nullopt : reduction(from, to, change, limit);
  const bool moves = !rescales && (change.embedded | change.formed) == 0;
  const uint32_t dropped = moves ? counts_.dropped_cuts(from, to) : 0;  // quick to compute
  // Where tiles are even, the rank that is known to miss as much stands for the mean of any ranks.
  const auto least_missing = [&](uint32_t some) {
    return is_every(some) || counts_.is_even(to) ? static_cast<double>(counts_.least_missing(to, dropped & some)) : 0;
  };
  if (dropped != 0 && is_dearer(dropped, least_missing, limit)) return std::nullopt;
  const ElementCounts::Needs needs = counts_.needs(from, to);
  // A Shard's piece surrounded by neutral elements is a term, so the pieces along its mesh dimension need not be
  // gathered.
  if ((needs.mesh_dims & ~change.embedded) == 0) {
    return rescales && !scales_ ? std::nullopt : std::optional(Step{.peak = element_size_ * counts_.live(from, to, 0)});
  }
  // Decides by the two ranks that LayoutSpace samples, which is quick and seldom wrong.
  const auto sampled = [&](uint32_t some) {
    return is_every(some) ? static_cast<double>(counts_.sampled_missing(to, needs)) : least_missing(some);
  };
  if (!moves || is_dearer(needs.mesh_dims, sampled, limit)) return std::nullopt;
  const Step out = move(from, to, needs, limit);
  return out.microseconds > limit ? std::nullopt : std::optional(out);
}

std::optional<Step> StepCosts::reduction(Node from, Node to, const Changes& change, double limit) {
  const bool scatters = (change.reduced & space_.sharded(to)) != 0;
  const auto n = static_cast<double>(counts_.ranks().ranks_of(change.reduced));
  const auto largest = static_cast<double>(counts_.largest(to));
  // A rank receives as much from each other rank of its group.
  const auto scattered = [&](uint32_t some) { return largest * other_ranks(change.reduced, some); };
  const auto reduced = [&](uint32_t some) { return 2 * largest * other_ranks(change.reduced, some) / n; };
  Step out = scatters ? priced(PlanStep::Kind::kReduceScatter, change.reduced, scattered)
                      : priced(PlanStep::Kind::kAllReduce, change.reduced, reduced);
  // whole_reduction may still be cheaper, since it may receive less.
  const bool hopeless = out.microseconds > limit && (!scatters || n <= 2);
  // Every rank must have a term of each element that it needs.
  if (hopeless || counts_.needs(from, to).mesh_dims != 0) return std::nullopt;
  const Step whole = scatters ? whole_reduction(from, to, change, std::min(limit, out.microseconds)) : out;
  if (std::min(out.microseconds, whole.microseconds) > limit || !space_.reduce_together(from, change.reduced)) {
    return std::nullopt;
  }
  if (whole.microseconds < out.microseconds && whole.peak <= live_limit_) return whole;
  out.peak = element_size_ * counts_.live(from, to, scatters ? n - 1 : 2 * (n - 1) / n);
  return out.microseconds > limit ? std::nullopt : std::optional(out);
}

// Returns the all_reduce of everything that the group needs, of which every rank keeps its own part. It is cheaper than
// a reduce_scatter where tiles are very uneven, or many are alike. Returns an infinite time where it cannot take less
// than `limit`, and where not all ranks are compared.
Step StepCosts::whole_reduction(Node from, Node to, const Changes& change, double limit) {
  const auto n = static_cast<double>(counts_.ranks().ranks_of(change.reduced));
  const Step never{.microseconds = kNever};
  const auto share = [&](uint32_t some) { return 2 * other_ranks(change.reduced, some) / n; };
  const auto reduce = [&](double elements) {
    return priced(PlanStep::Kind::kAllReduce, change.reduced, [&](uint32_t some) { return share(some) * elements; });
  };
  const uint32_t split_dims = change.reduced & space_.sharded(to);
  const bool even = counts_.is_even(to);
  const int64_t least = counts_.largest(to) * (even ? counts_.ranks().ranks_of(split_dims) : 1);
  if (!counts_.ranks().all || !(reduce(static_cast<double>(least)).microseconds < limit)) return never;
  const auto [most, live] = counts_.group_needs(from, to, change.reduced, split_dims);
  Step out = reduce(static_cast<double>(most));
  out.peak = element_size_ * (static_cast<double>(live) + share(counts_.ranks().every()) * static_cast<double>(most));
  return out;
}

double StepCosts::most_live(Node from, Node to) const {
  return element_size_ * static_cast<double>(counts_.largest(from) + 3 * counts_.largest(to));
}

Step StepCosts::move(Node from, Node to, const ElementCounts::Needs& needs, double limit) {
  const uint32_t needed = needs.mesh_dims;
  const ElementCounts::Missing missing = counts_.missing(from, to);
  const bool gathers =
      needs.whole && space_.changed(from, to) == needed && (space_.sharded(from) & space_.replicated(to)) == needed;
  const auto received = [&](uint32_t some) {
    return is_every(some) ? static_cast<double>(missing.most) : counts_.mean_across(from, to, some);
  };
  Step out = priced(gathers ? PlanStep::Kind::kAllGather : PlanStep::Kind::kAllToAll, needed, received, limit);
  out.peak = element_size_ * static_cast<double>(missing.live);
  return out;
}

void StepCosts::make_links() {
  links_.push_back({.microseconds = 0, .bytes_per_microsecond = kNever});
  for (std::size_t i = 0; i < model_.links.size(); ++i) {
    if (counts_.ranks().mesh_shape[i] == 1) model_.links[i] = links_[0];
    const Link& own = model_.links[i];
    for (std::size_t others = 0; others < std::size_t{1} << i; ++others) {
      Link link = links_[others];
      link.microseconds = std::max(link.microseconds, own.microseconds);
      link.bytes_per_microsecond = std::min(link.bytes_per_microsecond, own.bytes_per_microsecond);
      links_.push_back(link);
    }
  }
}

// Computes CostModel::microseconds over levels that are known, and rounds as it and find_bound do: a step that takes
// what the bound says is recognised by that.
Step StepCosts::priced(PlanStep::Kind kind, uint32_t mesh_dims, Received received, double limit) const {
  Step out{.kind = kind, .mesh_dims = mesh_dims, .bytes = received(counts_.ranks().every()) * element_size_};
  if (out.bytes == 0 || counts_.ranks().ranks_of(mesh_dims) == 1) return out;
  const Link& link = slowest(mesh_dims);
  const bool fast = link.bytes_per_microsecond == levels_.front().bytes_per_microsecond;  // no bytes cross slower links
  out.microseconds = link.microseconds + out.bytes / levels_.front().bytes_per_microsecond;
  if (fast || out.microseconds > limit) return out;
  double moving = 0;  // microseconds
  double slower = 0;  // bytes that cross the slower links
  for (std::size_t i = levels_.size(); i-- > 0;) {
    const double here = i == 0 ? out.bytes : received(levels_[i].mesh_dims) * element_size_;
    const double bytes = std::max(here, slower);
    moving += (bytes - slower) / levels_[i].bytes_per_microsecond;
    slower = bytes;
    out.microseconds = link.microseconds + moving;
    if (out.microseconds > limit) break;
  }
  return out;
}

// ---- bounds ---------------------------------------------------------------------------------------------------------

double StepCosts::bound(Node node) {
  if (bounds_.size() < static_cast<std::size_t>(space_.size()))
    bounds_.resize(static_cast<std::size_t>(space_.size()), -1);
  double& known = bounds_[static_cast<std::size_t>(node)];
  if (known < 0) known = find_bound(node);
  return known;
}

// A step over some mesh dimensions is no faster than the fastest of them allows. Bytes that must cross slower links
// cannot be moved by steps over the faster ones alone.
double StepCosts::find_bound(Node node) {
  const Node target = space_.to();
  if (node == target) return 0;
  double slower = 0;  // bytes that must cross links slower than those of this level
  double latency = 0;
  double out = 0;
  for (std::size_t i = levels_.size(); i-- > 0;) {
    const Level& level = levels_[i];
    double elements = least_over(node, level.mesh_dims);
    if (i == 0) elements = std::max(elements, most_received(node));
    const double bytes = elements * element_size_;
    if (bytes <= 0) continue;
    latency = std::max(latency, level.microseconds);
    out += std::max(bytes - slower, 0.0) / level.bytes_per_microsecond;
    slower = std::max(slower, bytes);
  }
  return latency + out;
}

double StepCosts::least_over(Node node, uint32_t mesh_dims) {
  const Node target = space_.to();
  const uint32_t other = space_.changed_partials(node, target);
  const uint32_t new_reductions = (space_.pending(target) & ~space_.pending(node)) | other;
  const auto ranks_of = [&](uint32_t some) { return static_cast<double>(counts_.ranks().ranks_of(some & mesh_dims)); };
  const double held = counts_.held_by_groups(node, target, mesh_dims);
  const Ends ends{
      .elements = counts_.elements(),
      .terms = ranks_of(space_.pending(node)),
      .reduced = ranks_of((space_.pending(node) & ~space_.pending(target)) | other),
      .pieces_per_element = ranks_of(space_.pending(target)),
      .copies = ranks_of(space_.replicated(target)),
      .held = held,
      .reachable = new_reductions == 0 ? held : counts_.held_by_groups(node, target, mesh_dims & ~new_reductions),
      .new_copies = ranks_of(space_.replicated(target) & ~space_.replicated(node)) > 1,
  };
  return least_received_by_steps(ends) / static_cast<double>(counts_.ranks().ranks);
}

// Returns a lower bound on the elements that the rank that receives most receives.
double StepCosts::most_received(Node node) {
  const Node target = space_.to();
  if ((space_.pending(node) | space_.pending(target)) == 0)
    return static_cast<double>(counts_.missing(node, target).most);
  // No rank has the value of an element whose reduction is pending.
  const bool whole = space_.pending(target) == 0 && counts_.ranks().ranks_of(space_.pending(node)) > 1;
  return whole ? static_cast<double>(counts_.largest(target)) : 0;
}

}  // namespace tessera

#include "tessera/tests/harness/brute_force.h"

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/placement/layout.h"
#include "tessera/placement/reduction.h"

namespace tessera::brute {
namespace {

// The bytes of a step are rounded, by less than this many bytes.
constexpr double kRounding = 0.75;

MeshDims mesh_dims_where(const Placements& placements, const auto& condition) {
  MeshDims out = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (condition(i)) out |= MeshDims{1} << i;
  }
  return out;
}

bool contains(const Elements& whole, const Elements& part) { return (part & ~whole).none(); }

bool inside(MeshDims part, MeshDims whole) { return (part & ~whole) == 0; }

bool reduces(PlanStep::Kind kind) {
  return kind == PlanStep::Kind::kAllReduce || kind == PlanStep::Kind::kReduceScatter;
}

// Returns whether a step of the planner's kind may be the `allowed` one; all_to_all stands for every kind that only
// moves elements.
bool could_be(PlanStep::Kind allowed, PlanStep::Kind step) {
  if (reduces(allowed) || reduces(step)) return allowed == step;
  return allowed == PlanStep::Kind::kLocal || step != PlanStep::Kind::kLocal;
}

// Returns `placements` once for every permutation of 0, 1, ... as the orders of its Shards. Other placements have no
// order.
std::vector<Placements> in_every_order(const Placements& placements) {
  std::vector<int64_t> orders;
  for (const Placement& p : placements) {
    if (p.is_shard()) orders.push_back(static_cast<int64_t>(orders.size()));
  }
  std::vector<Placements> out;
  do {
    out.push_back(placements);
    std::size_t next = 0;
    for (Placement& p : out.back()) {
      if (p.is_shard()) p = p.ordered(orders[next++]);
    }
  } while (std::next_permutation(orders.begin(), orders.end()));
  return out;
}

}  // namespace

std::vector<int64_t> listed(MeshDims dims) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < 32; ++i) {
    if (dims >> i & 1) out.push_back(i);
  }
  return out;
}

std::string to_string(const Optimum& optimum) {
  std::string out =
      fmt::format("{:.3f} us{}:", optimum.microseconds, optimum.within_limit ? "" : ", above the limit of live bytes");
  for (const Leg& leg : optimum.legs) {
    out +=
        fmt::format(" {} over {{{}}} to {} ({:.0f} B, {:.0f} live);", tessera::to_string(leg.step.kind),
                    fmt::join(listed(leg.step.over), ","), tessera::to_string(leg.to), leg.step.bytes, leg.step.live);
  }
  return out;
}

BruteForce::BruteForce(std::vector<int64_t> shape, at::ScalarType dtype, Mesh mesh)
    : shape_(std::move(shape)), item_(static_cast<double>(c10::elementSize(dtype))), mesh_(std::move(mesh)) {
  int64_t numel = 1;
  for (const int64_t size : shape_) numel *= size;
  if (numel > static_cast<int64_t>(kMostElements)) {
    throw std::invalid_argument(fmt::format("BruteForce: {} elements are more than {}", numel, kMostElements));
  }
  for (const int64_t rank : mesh_.ranks()) coordinates_.push_back(*mesh_.coordinate_of(rank));
  for (MeshDims over = 0; over < MeshDims{1} << mesh_.ndim(); ++over) {
    std::vector<int>& first = group_.emplace_back();
    for (const auto& mine : coordinates_) {
      const auto agrees = [&](const std::vector<int64_t>& other) {
        for (std::size_t i = 0; i < mine.size(); ++i) {
          if (!(over >> i & 1) && mine[i] != other[i]) return false;
        }
        return true;
      };
      first.push_back(
          static_cast<int>(std::find_if(coordinates_.begin(), coordinates_.end(), agrees) - coordinates_.begin()));
    }
  }
}

// ---- what every rank holds ------------------------------------------------------------------------------------------

Elements BruteForce::elements_of(const std::vector<int64_t>& coordinate, const Placements& placements) const {
  std::vector<int64_t> numbers = {0};  // row-major indexes over the tensor dimensions so far
  const Tile tile = local_tile(shape_, placements, mesh_.shape(), coordinate);
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t before : numbers) {
      for (const Interval& interval : tile[d]) {
        for (int64_t i = interval.begin; i < interval.end; ++i) next.push_back(before * shape_[d] + i);
      }
    }
    numbers = std::move(next);
  }
  Elements out;
  for (const int64_t number : numbers) out.set(static_cast<std::size_t>(number));
  return out;
}

int BruteForce::layout(const Placements& placements) {
  const auto [known, is_new] = number_of_.try_emplace(tessera::to_string(placements), -1);
  if (!is_new) return known->second;
  if (!partials_commute(placements)) return -1;
  try {
    check_layout(placements, mesh_, shape_, "BruteForce");
  } catch (const std::invalid_argument&) {
    return -1;
  }
  Layout out;
  out.placements = placements;
  out.pending = mesh_dims_where(placements, [&](std::size_t i) { return placements[i].is_partial(); });
  for (const auto& coordinate : coordinates_) {
    out.held.push_back(elements_of(coordinate, placements));
    out.largest = std::max(out.largest, static_cast<double>(out.held.back().count()) * item_);
  }
  out.within.resize(group_.size());
  layouts_.push_back(std::move(out));
  return known->second = static_cast<int>(layouts_.size()) - 1;
}

const std::vector<Elements>& BruteForce::within(int layout, MeshDims over) {
  Layout& it = layouts_[static_cast<std::size_t>(layout)];
  std::vector<Elements>& out = it.within[over];
  if (!out.empty()) return out;
  out.resize(coordinates_.size());
  for (std::size_t r = 0; r < out.size(); ++r) out[static_cast<std::size_t>(group_[over][r])] |= it.held[r];
  for (std::size_t r = 0; r < out.size(); ++r) out[r] = out[static_cast<std::size_t>(group_[over][r])];
  return out;
}

// ---- one step -------------------------------------------------------------------------------------------------------

bool BruteForce::move_is_legal(int from, int to, MeshDims over) {
  const std::vector<Elements>& group = within(from, over);
  const std::vector<Elements>& wanted = layouts_[static_cast<std::size_t>(to)].held;
  for (std::size_t r = 0; r < wanted.size(); ++r) {
    if (!contains(group[r], wanted[r])) return false;
  }
  return true;
}

double BruteForce::received(int from, int to) const {
  const Layout& a = layouts_[static_cast<std::size_t>(from)];
  const Layout& b = layouts_[static_cast<std::size_t>(to)];
  std::size_t most = 0;
  for (std::size_t r = 0; r < a.held.size(); ++r) most = std::max(most, (b.held[r] & ~a.held[r]).count());
  return static_cast<double>(most) * item_;
}

double BruteForce::received_across(int from, int to, const Step& step, MeshDims slow) {
  const MeshDims every = static_cast<MeshDims>(group_.size()) - 1;
  if (slow == every) return step.bytes;
  if (reduces(step.kind)) {  // as much from each other rank of the group
    double all = 1, near = 1;
    for (const int64_t i : listed(step.over)) all *= static_cast<double>(mesh_.size(i));
    for (const int64_t i : listed(step.over & ~slow)) near *= static_cast<double>(mesh_.size(i));
    return step.bytes * (all - near) / (all - 1);
  }
  const std::vector<Elements>& near = within(from, every & ~slow);
  const std::vector<Elements>& wanted = layouts_[static_cast<std::size_t>(to)].held;
  const std::vector<int>& group = group_[every & ~slow];
  std::vector<std::size_t> received(wanted.size(), 0);
  for (std::size_t r = 0; r < wanted.size(); ++r)
    received[static_cast<std::size_t>(group[r])] += (wanted[r] & ~near[r]).count();
  const auto ranks = static_cast<double>(std::ranges::count(group, group[0]));
  return static_cast<double>(std::ranges::max(received)) * item_ / ranks;
}

// Returns the bytes of the source tile, the target tile, and `extra_times` what is received, on the rank that has most.
double BruteForce::live(int from, int to, double extra_times) const {
  const Layout& a = layouts_[static_cast<std::size_t>(from)];
  const Layout& b = layouts_[static_cast<std::size_t>(to)];
  double most = 0;
  for (std::size_t r = 0; r < a.held.size(); ++r) {
    most = std::max(most, static_cast<double>(a.held[r].count() + b.held[r].count()) +
                              extra_times * static_cast<double>((b.held[r] & ~a.held[r]).count()));
  }
  return most * item_;
}

std::vector<Step> BruteForce::reductions(int from, int to, MeshDims over) {
  double ranks = 1;
  for (const int64_t i : listed(over)) ranks *= static_cast<double>(mesh_.size(i));
  // After an all_reduce every rank has all elements that its group needs: its target tile or more.
  const std::vector<Elements>& source = layouts_[static_cast<std::size_t>(from)].held;
  const std::vector<Elements>& reduced = within(to, over);
  std::size_t most = 0, most_live = 0;
  for (std::size_t r = 0; r < reduced.size(); ++r) {
    most = std::max(most, reduced[r].count());
    most_live = std::max(most_live, source[r].count() + reduced[r].count());
  }
  const double all = 2 * static_cast<double>(most) * item_ * (ranks - 1) / ranks;
  const double scattered = (ranks - 1) * layouts_[static_cast<std::size_t>(to)].largest;
  return {{.kind = PlanStep::Kind::kAllReduce,
           .over = over,
           .bytes = all,
           .live = static_cast<double>(most_live) * item_ + all},
          {.kind = PlanStep::Kind::kReduceScatter,
           .over = over,
           .bytes = scattered,
           .live = live(from, to, 0) + scattered}};
}

std::vector<Step> BruteForce::find_steps(int from, int to) {
  const Layout& a = layouts_[static_cast<std::size_t>(from)];
  const Layout& b = layouts_[static_cast<std::size_t>(to)];
  const auto same = [&](std::size_t i) {
    const Placement &x = a.placements[i], &y = b.placements[i];
    return x.is_partial() && y.is_partial() && (x == y || (x.reduction().slope(1) && y.reduction().slope(1)));
  };
  const MeshDims kept = mesh_dims_where(a.placements, same);
  const MeshDims reduced = a.pending & ~kept;
  const MeshDims formed = b.pending & ~kept;
  if (reduced && formed) return {};
  if (reduced) {
    if (!move_is_legal(from, to, 0)) return {};
    return reductions(from, to, reduced);
  }
  if (move_is_legal(from, to, formed)) return {{.live = live(from, to, 0)}};
  if (formed) return {};
  std::vector<Step> out;
  const MeshDims every = (MeshDims{1} << mesh_.ndim()) - 1;
  for (MeshDims over = 1; over <= every; ++over) {
    const bool needless =
        std::any_of(out.begin(), out.end(), [&](const Step& smaller) { return inside(smaller.over, over); });
    if (needless || (over & kept) || !move_is_legal(from, to, over)) continue;
    out.push_back(
        {.kind = PlanStep::Kind::kAllToAll, .over = over, .bytes = received(from, to), .live = live(from, to, 2)});
  }
  return out;
}

const std::vector<Step>& BruteForce::steps(int from, int to) {
  const uint64_t key = static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to);
  const auto known = steps_.find(key);
  if (known != steps_.end()) return known->second;
  return steps_.emplace(key, find_steps(from, to)).first->second;
}

std::vector<Step> BruteForce::steps(const Placements& from, const Placements& to) {
  const int a = layout(from), b = layout(to);
  if (a < 0 || b < 0) throw std::invalid_argument("BruteForce: not a layout");
  return steps(a, b);
}

LowerBound BruteForce::missing(const Placements& from, const Placements& to) {
  const int x = layout(from), y = layout(to);
  const Layout& a = layouts_[static_cast<std::size_t>(x)];
  const Layout& b = layouts_[static_cast<std::size_t>(y)];
  LowerBound out;
  for (std::size_t r = 0; r < a.held.size(); ++r) {
    const auto bytes = static_cast<int64_t>(static_cast<double>((b.held[r] & ~a.held[r]).count()) * item_);
    out.max_bytes = std::max(out.max_bytes, bytes);
    out.total_bytes += bytes;
  }
  return out;
}

double BruteForce::live_limit(const Placements& from, const Placements& to) {
  const int x = layout(from), y = layout(to);
  const double a = layouts_[static_cast<std::size_t>(x)].largest;
  const double b = layouts_[static_cast<std::size_t>(y)].largest;
  return a + b + 2 * std::max(a, b);
}

std::string BruteForce::objection(const Plan& plan, const Placements& from, const Placements& to) {
  Placements now = from;
  for (const PlanStep& step : plan.steps()) {
    const auto say = [&](const std::string& what) {
      return fmt::format("{} on {{{}}} from {} to {}: {}", tessera::to_string(step.kind),
                         fmt::join(step.mesh_dims, ","), tessera::to_string(step.from), tessera::to_string(step.to),
                         what);
    };
    if (step.from != now) return say("it does not begin where the step before ends");
    const int a = layout(step.from), b = layout(step.to);
    if (a < 0 || b < 0) return say("it is not between two valid layouts");
    MeshDims over = 0;
    for (const int64_t i : step.mesh_dims) over |= MeshDims{1} << i;
    const Step* allowed = nullptr;
    for (const Step& known : steps(a, b)) {
      if (inside(known.over, over) && could_be(known.kind, step.kind)) allowed = &known;
    }
    if (!allowed) return say("its groups do not hold what they need");
    if (static_cast<double>(step.max_bytes) < allowed->bytes - kRounding) {
      return say(fmt::format("it states {} bytes received, but they are {:.2f}", step.max_bytes, allowed->bytes));
    }
    if (static_cast<double>(step.peak_bytes) < allowed->live - kRounding) {
      return say(fmt::format("it states {} bytes live, but they are {:.2f}", step.peak_bytes, allowed->live));
    }
    now = step.to;
  }
  return now == to ? "" : fmt::format("it ends in {}", tessera::to_string(now));
}

// ---- all steps ------------------------------------------------------------------------------------------------------

std::vector<Placements> BruteForce::on_the_way(const Placements& from, const Placements& to) const {
  std::vector<Placements> out = {{}};
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::vector<Placement> choices;
    const auto add = [&](const Placement& p) {
      const Placement plain = p.is_shard() ? p.ordered(0) : p;
      if (std::find(choices.begin(), choices.end(), plain) == choices.end()) choices.push_back(plain);
    };
    add(from[i]);
    add(to[i]);
    add(Replicate());
    for (std::size_t d = 0; d < shape_.size(); ++d) add(Shard(static_cast<int64_t>(d)));
    std::vector<Placements> longer;
    for (const Placements& before : out) {
      for (const Placement& choice : choices) {
        longer.push_back(before);
        longer.back().push_back(choice);
      }
    }
    out = std::move(longer);
  }
  std::vector<Placements> ordered;
  for (const Placements& placements : out) {
    for (Placements& each : in_every_order(placements)) {
      ordered.push_back(normalize(each, mesh_, static_cast<int64_t>(shape_.size()), "BruteForce"));
    }
  }
  return ordered;
}

const BruteForce::Graph& BruteForce::graph(const Placements& from, const Placements& to) {
  if (!graph_.layouts.empty() && graph_.from == from && graph_.to == to) return graph_;
  const int source = layout(from), target = layout(to);
  if (source < 0 || target < 0) throw std::invalid_argument("BruteForce: not a layout");
  std::set<int> others = {target};
  for (const Placements& placements : on_the_way(from, to)) others.insert(layout(placements));
  others.erase(source);
  others.erase(-1);
  graph_ = {.from = from, .to = to, .layouts = {source}, .limit = live_limit(from, to)};
  graph_.layouts.insert(graph_.layouts.end(), others.begin(), others.end());
  const auto size = static_cast<int>(graph_.layouts.size());
  for (int i = 0; i < size; ++i) {
    graph_.begin.push_back(graph_.edges.size());
    const int a = graph_.layouts[static_cast<std::size_t>(i)];
    if (a == target) graph_.target = i;
    for (int j = 0; j < size; ++j) {
      if (i == j) continue;
      for (const Step& step : steps(a, graph_.layouts[static_cast<std::size_t>(j)]))
        graph_.edges.push_back({i, j, step});
    }
  }
  graph_.begin.push_back(graph_.edges.size());
  return graph_;
}

// Runs Dijkstra's algorithm over the steps whose live bytes are within `limit`. Returns whether there is a path.
bool BruteForce::search(const Graph& graph, const CostModel& model, double limit, Optimum& out) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto layout_of = [&](int i) { return graph.layouts[static_cast<std::size_t>(i)]; };
  const auto time_of = [&](const Edge& edge) {
    if (edge.step.over == 0) return 0.0;
    return model.microseconds(edge.step.over, [&](MeshDims slow) {
      return received_across(layout_of(edge.from), layout_of(edge.to), edge.step, slow);
    });
  };
  const std::size_t size = graph.layouts.size();
  std::vector<double> time(size, kNever);
  std::vector<const Edge*> last(size, nullptr);
  std::vector<bool> done(size, false);
  time[0] = 0;
  while (true) {
    std::size_t nearest = size;
    for (std::size_t i = 0; i < size; ++i) {
      if (!done[i] && time[i] < kNever && (nearest == size || time[i] < time[nearest])) nearest = i;
    }
    if (nearest == size || static_cast<int>(nearest) == graph.target) break;
    done[nearest] = true;
    for (std::size_t e = graph.begin[nearest]; e < graph.begin[nearest + 1]; ++e) {
      const Edge& edge = graph.edges[e];
      const auto to = static_cast<std::size_t>(edge.to);
      const double arrival = time[nearest] + time_of(edge);
      if (edge.step.live > limit + kRounding || arrival >= time[to]) continue;
      time[to] = arrival;
      last[to] = &edge;
    }
  }
  const auto target = static_cast<std::size_t>(graph.target);
  if (time[target] == kNever) return false;
  out.microseconds = time[target];
  for (std::size_t at = target; last[at]; at = static_cast<std::size_t>(last[at]->from)) {
    const auto placements = [&](int i) { return layouts_[static_cast<std::size_t>(layout_of(i))].placements; };
    out.legs.push_back({placements(last[at]->from), placements(last[at]->to), last[at]->step, time_of(*last[at])});
  }
  std::reverse(out.legs.begin(), out.legs.end());
  return true;
}

Optimum BruteForce::cheapest(const Placements& from, const Placements& to, const CostModel& model) {
  Optimum out;
  const Graph& all = graph(from, to);
  if (search(all, model, all.limit, out)) return out;
  out.within_limit = false;
  if (!search(all, model, std::numeric_limits<double>::infinity(), out)) {
    throw std::runtime_error(fmt::format("BruteForce: no sequence of steps leads from {} to {}",
                                         tessera::to_string(from), tessera::to_string(to)));
  }
  return out;
}

}  // namespace tessera::brute

#include "tessera/placement/plan.h"

#include <algorithm>

#include <fmt/format.h>

namespace tessera {
namespace {

bool needs_replicate_between(const Placement& from, const Placement& to) { return to.is_partial() && !from.is_replicate(); }

class Planner {
 public:
  Planner(Placements from, const Placements& to, std::span<const int64_t> mesh_shape)
      : current_(std::move(from)), target_(to), mesh_shape_(mesh_shape) {}

  Plan run() {
    const auto n = static_cast<int64_t>(current_.size());
    for (int64_t i = n - 1; i >= 0; --i) move(i, ready(i) ? at(target_, i) : Replicate());
    for (int64_t i = 0; i < n; ++i) move(i, at(target_, i));
    return std::move(plan_);
  }

 private:
  static Placement& at(Placements& p, int64_t i) { return p[static_cast<std::size_t>(i)]; }
  static const Placement& at(const Placements& p, int64_t i) { return p[static_cast<std::size_t>(i)]; }
  int64_t ranks(int64_t i) const { return mesh_shape_[static_cast<std::size_t>(i)]; }

  // Whether the mesh dimensions outside `i` shard the target's tensor dimension as the target does.
  bool aligned(int64_t i) const {
    const Placement& want = at(target_, i);
    if (!want.is_shard()) return true;
    for (int64_t outer = 0; outer < i; ++outer) {
      if (ranks(outer) == 1) continue;
      if (at(current_, outer).is_shard(want.tensor_dim()) != at(target_, outer).is_shard(want.tensor_dim())) return false;
    }
    return true;
  }

  // A Partial is formed last: what is pending on other mesh dimensions until then may not commute with it.
  bool ready(int64_t i) const { return at(target_, i).is_partial() ? at(current_, i) == at(target_, i) : aligned(i); }

  void move(int64_t i, const Placement& to) {
    Placement& from = at(current_, i);
    if (from == to) return;
    if (ranks(i) > 1 && needs_replicate_between(from, to)) move(i, Replicate());
    if (ranks(i) > 1) plan_.push_back({.mesh_dim = i, .from = from, .to = to});
    from = to;
  }

  Placements current_;
  const Placements& target_;
  std::span<const int64_t> mesh_shape_;
  Plan plan_;
};

}  // namespace

const char* step_name(const PlanStep& step) {
  switch (step.from.kind()) {
    case Placement::Kind::kReplicate: return step.to.is_shard() ? "slice" : "to_partial";
    case Placement::Kind::kShard: return step.to.is_shard() ? "all_to_all" : "all_gather";
    case Placement::Kind::kPartial: return step.to.is_shard() ? "reduce_scatter" : "all_reduce";
  }
  return "";
}

bool communicates(const PlanStep& step) { return !step.from.is_replicate(); }

std::string to_string(const Plan& plan, const std::vector<std::string>& mesh_dim_names) {
  if (plan.empty()) return "nothing to do";
  std::string out;
  for (const PlanStep& step : plan) {
    const auto dim = static_cast<std::size_t>(step.mesh_dim);
    if (!out.empty()) out += "; ";
    out += fmt::format("{} on {}: {} -> {}", step_name(step),
                       dim < mesh_dim_names.size() ? mesh_dim_names[dim] : std::to_string(step.mesh_dim),
                       to_string(step.from), to_string(step.to));
  }
  return out;
}

bool communicates(const Plan& plan) {
  return std::any_of(plan.begin(), plan.end(), [](const PlanStep& step) { return communicates(step); });
}

Plan plan_redistribute(const Placements& from, const Placements& to, std::span<const int64_t> mesh_shape) {
  return Planner(from, to, mesh_shape).run();
}

double estimated_microseconds(const PlanStep& step, double bytes, int64_t ranks) {
  if (!communicates(step)) return 0;
  constexpr double kLatency = 120;  // Gloo on one host, a small collective
  constexpr double kBytesPerMicrosecond = 2000;
  const auto n = static_cast<double>(ranks);
  double moved = bytes * (n - 1) / n;
  if (step.from.is_partial() && step.to.is_replicate()) moved *= 2;
  if (step.from.is_shard() && step.to.is_shard()) moved /= n;
  return kLatency + moved / kBytesPerMicrosecond;
}

}  // namespace tessera

#include "tessera/dtensor/explain.h"

#include <ostream>
#include <vector>

#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"

namespace tessera {
namespace {

std::string indented(const std::string& lines) {
  std::string out = "  ";
  for (const char c : lines) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

std::string row(const char* name, const Plan& plan) {
  return fmt::format("{:<18} {:>14} {:>14} {:>14} {:>12.4g}\n", name, plan.max_bytes(), plan.total_bytes(),
                     plan.peak_bytes(), plan.microseconds());
}

}  // namespace

std::string Explanation::to_string() const {
  std::string out = fmt::format("{}:\n{}\n", tensor, indented(plan.to_string()));
  out += fmt::format("{:<18} {:>14} {:>14} {:>14} {:>12}\n", "bytes", "most by a rank", "by all", "live", "us");
  out += row("this plan", plan);
  out += fmt::format("{:<18} {:>14} {:>14}\n", "lower bound", lower_bound.max_bytes, lower_bound.total_bytes);
  return out + row("gather everything", gather_everything);
}

std::ostream& operator<<(std::ostream& out, const Explanation& explanation) { return out << explanation.to_string(); }

Explanation explain(const at::Tensor& dtensor, const Placements& placements, const CostModel& model) {
  const Spec& spec = spec_of(dtensor);
  const Mesh& mesh = spec.mesh.mesh();
  const CostModel costs = model.links.empty() ? default_cost_model(spec.mesh) : model;
  const auto plan = [&](const Placements& from, const Placements& to) {
    return plan_redistribute(spec.sizes, spec.dtype, mesh, from, to, costs);
  };
  const Placements everywhere(spec.placements.size(), Replicate());
  std::vector<PlanStep> gathered = plan(spec.placements, everywhere).steps();
  const Plan onward = plan(everywhere, placements);
  gathered.insert(gathered.end(), onward.steps().begin(), onward.steps().end());
  return {.tensor = fmt::format("{} to {}", to_string(spec), to_string(placements)),
          .plan = plan(spec.placements, placements),
          .lower_bound = lower_bound(spec.sizes, spec.dtype, mesh, spec.placements, placements),
          .gather_everything = Plan(mesh, spec.sizes, spec.dtype, std::move(gathered))};
}

}  // namespace tessera

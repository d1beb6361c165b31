#include "tessera/ops/rules/search.h"

#include <algorithm>
#include <stdexcept>

#include "tessera/placement/plan.h"

namespace tessera::rules {
namespace {

constexpr double kLocalChange = 1e-3;  // a slice or a zero fill: free, but not better than nothing

double bytes_of(const TensorInfo& info) {
  double bytes = static_cast<double>(c10::elementSize(info.dtype));
  for (const int64_t size : info.sizes) bytes *= static_cast<double>(size);
  return bytes;
}

class Search {
 public:
  Search(const OpRule& rule, const std::vector<TensorInfo>& inputs, std::size_t num_outputs,
         const std::vector<Placements>& current, std::span<const int64_t> mesh_shape, std::span<const Written> written)
      : rule_(rule), inputs_(inputs), current_(current), mesh_shape_(mesh_shape), written_(written) {
    replicate_ = {.inputs = Placements(inputs.size(), Replicate()), .outputs = Placements(num_outputs, Replicate())};
    choice_.inputs.resize(inputs.size());
    choice_.outputs.resize(num_outputs);
    choice_.kernel = rule.kernel;
  }

  std::optional<Choice> run() {
    for (std::size_t i = 0; i < mesh_shape_.size(); ++i) {
      const Strategy* best = nullptr;
      double best_cost = 0;
      consider(replicate_, i, best, best_cost);
      for (const Strategy& strategy : rule_.strategies) consider(strategy, i, best, best_cost);
      if (best == nullptr) return std::nullopt;
      push(*best);
      choice_.microseconds += best_cost;
      if (!best->kernel.empty()) choice_.kernel = best->kernel;
    }
    return std::move(choice_);
  }

 private:
  void consider(const Strategy& strategy, std::size_t mesh_dim, const Strategy*& best, double& best_cost) {
    if (strategy.inputs.size() != inputs_.size() || strategy.outputs.size() != choice_.outputs.size()) {
      throw std::logic_error("a sharding rule gave a strategy for another number of tensors");
    }
    if (!keeps_written(strategy, mesh_dim)) return;
    const double cost = cost_of(strategy, mesh_dim);
    if (best != nullptr && cost >= best_cost) return;
    if (!goes_with_chosen(strategy)) return;
    best = &strategy;
    best_cost = cost;
  }

  bool keeps_written(const Strategy& strategy, std::size_t mesh_dim) const {
    return std::all_of(written_.begin(), written_.end(), [&](const Written& w) {
      const Placement& now = current_[w.input][mesh_dim];
      return strategy.inputs[w.input] == now && strategy.outputs[w.output] == now;
    });
  }

  double cost_of(const Strategy& strategy, std::size_t mesh_dim) const {
    double cost = 0;
    for (std::size_t j = 0; j < inputs_.size(); ++j) {
      if (!inputs_[j].defined) continue;
      const PlanStep step{
          .mesh_dim = static_cast<int64_t>(mesh_dim), .from = current_[j][mesh_dim], .to = strategy.inputs[j]};
      if (step.from == step.to) continue;
      cost += kLocalChange;
      if (mesh_shape_[mesh_dim] == 1) continue;
      cost += estimated_microseconds(step, piece_bytes(j, mesh_dim), mesh_shape_[mesh_dim]);
      if (step.to.is_partial() && !step.from.is_replicate()) cost += kLocalChange;
    }
    return cost;
  }

  // Bytes of input j as the mesh dimensions other than this one leave it.
  double piece_bytes(std::size_t j, std::size_t mesh_dim) const {
    double bytes = bytes_of(inputs_[j]);
    for (std::size_t i = 0; i < mesh_shape_.size(); ++i) {
      const Placement& p = i < choice_.inputs[j].size() ? choice_.inputs[j][i] : current_[j][i];
      if (i != mesh_dim && p.is_shard()) bytes /= static_cast<double>(mesh_shape_[i]);
    }
    return bytes;
  }

  bool goes_with_chosen(const Strategy& strategy) {
    if (!rule_.valid) return true;
    push(strategy);
    const bool valid = rule_.valid(choice_.inputs, choice_.outputs, mesh_shape_);
    for (Placements& p : choice_.inputs) p.pop_back();
    for (Placements& p : choice_.outputs) p.pop_back();
    return valid;
  }

  void push(const Strategy& strategy) {
    for (std::size_t j = 0; j < choice_.inputs.size(); ++j) choice_.inputs[j].push_back(strategy.inputs[j]);
    for (std::size_t j = 0; j < choice_.outputs.size(); ++j) choice_.outputs[j].push_back(strategy.outputs[j]);
  }

  const OpRule& rule_;
  const std::vector<TensorInfo>& inputs_;
  const std::vector<Placements>& current_;
  std::span<const int64_t> mesh_shape_;
  std::span<const Written> written_;
  Strategy replicate_;
  Choice choice_;
};

}  // namespace

std::optional<Choice> choose(const OpRule& rule, const std::vector<TensorInfo>& inputs, std::size_t num_outputs,
                             const std::vector<Placements>& current, std::span<const int64_t> mesh_shape,
                             std::span<const Written> written) {
  return Search(rule, inputs, num_outputs, current, mesh_shape, written).run();
}

}  // namespace tessera::rules

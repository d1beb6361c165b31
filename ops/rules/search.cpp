#include "tessera/ops/rules/search.h"

#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/reduction.h"

namespace tessera::rules {
namespace {

// Is the time to slice or fill with zeros: nothing is sent, but it is worse than no change.
constexpr double kLocalChangeMicroseconds = 1e-3;

double bytes_of(const TensorInfo& info) {
  double bytes = static_cast<double>(c10::elementSize(info.dtype));
  for (const int64_t size : info.sizes) bytes *= static_cast<double>(size);
  return bytes;
}

// Returns the number of parts into which the other mesh dimensions cut a tensor.
int64_t parts_elsewhere(const Placements& placements, std::span<const int64_t> mesh_shape, std::size_t mesh_dim) {
  int64_t parts = 1;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (i != mesh_dim && placements[i].is_shard()) parts *= mesh_shape[i];
  }
  return parts;
}

// Returns the largest part's share of a dimension of `size` elements that is cut into `ranks` chunks.
double largest_part(int64_t size, int64_t ranks) {
  return size == 0 ? 0 : static_cast<double>((size + ranks - 1) / ranks) / static_cast<double>(size);
}

// Estimates the time to change one mesh dimension's placement of a tensor of `sizes`, of which a piece that is whole
// along this mesh dimension has `bytes`, on the `link` of that dimension. It is 0 if nothing is sent.
double change_cost(const Placement& from, const Placement& to, double bytes, const std::vector<int64_t>& sizes,
                   int64_t ranks, const Link& link) {
  const bool applies_mask =
      from.is_partial() && from.reduction().unmasked() && to == Partial(from.reduction().unmasked());
  if (ranks == 1 || from.is_replicate() || applies_mask) return 0;
  const auto n = static_cast<double>(ranks);
  double moved = bytes * (n - 1) / n;
  if (from.is_partial() && !to.is_shard()) moved *= 2;
  if (from.is_shard() && to.is_shard())
    moved *= largest_part(sizes.at(static_cast<std::size_t>(to.tensor_dim())), ranks);
  return link.microseconds + moved / link.bytes_per_microsecond;
}

// Says whether a strategy's placement stands for every partition and order. One with a partition of its own does not.
bool is_any_shard(const Placement& p) { return p.is_shard() && p.is_chunks() && p.order() == 0; }

// Returns the strategy with every such Shard given the partition and order of the Shard `like`.
Strategy with_partition(Strategy strategy, const Placement& like) {
  for (Placements* list : {&strategy.inputs, &strategy.outputs}) {
    for (Placement& p : *list) {
      if (is_any_shard(p)) p = like.on(p.tensor_dim());
    }
  }
  return strategy;
}

bool shards(const Strategy& strategy) {
  return std::ranges::any_of(strategy.inputs, is_any_shard) || std::ranges::any_of(strategy.outputs, is_any_shard);
}

// Says whether each of these is a layout of its tensor. Those without another partition than torch.chunk's always are.
bool are_complete(const std::vector<Placements>& all, const std::vector<TensorInfo>& tensors, const Mesh& mesh) {
  for (std::size_t j = 0; j < tensors.size(); ++j) {
    const bool may_fail =
        std::ranges::any_of(all[j], [](const Placement& p) { return p.is_shard() && !p.is_chunks(); });
    if (tensors[j].defined && may_fail && !is_layout(all[j], mesh, tensors[j].sizes)) return false;
  }
  return true;
}

// Says on which mesh dimensions a search also tries the partitions that inputs have there, other than torch.chunk's.
enum class OtherPartitions { kAll, kOnSeveralRanks, kNone };

// Says whether a kernel of the rule's, which every layout has, may communicate.
bool may_join(std::string_view kernel, std::span<const int64_t> mesh_shape) {
  return !kernel.empty() && std::ranges::any_of(mesh_shape, [](int64_t size) { return size > 1; });
}

class Search {
 public:
  Search(const OpRule& rule, const std::vector<TensorInfo>& inputs, const std::vector<TensorInfo>& outputs,
         const std::vector<Placements>& current, std::span<const int64_t> mesh_shape, const CostModel& model,
         std::span<const Written> written, OtherPartitions others, std::vector<Considered>* considered)
      : rule_(rule),
        inputs_(inputs),
        outputs_(outputs),
        current_(current),
        mesh_shape_(mesh_shape),
        model_(model),
        written_(written),
        others_(others),
        considered_(considered) {
    replicate_ = {.inputs = Placements(inputs.size(), Replicate()), .outputs = Placements(outputs.size(), Replicate())};
    choice_.inputs.resize(inputs.size());
    choice_.outputs.resize(outputs.size());
    choice_.kernel = rule.kernel;
  }

  std::optional<Choice> run() {
    bool kernel_is_of_strategy = false;
    for (std::size_t i = 0; i < mesh_shape_.size(); ++i) {
      const Placements others = other_partitions(i);
      std::optional<Strategy> best;
      double best_cost = 0;
      consider(replicate_, i, best, best_cost);
      for (const Strategy& strategy : rule_.strategies) {
        if (mesh_shape_[i] == 1 && strategy.joined && strategy.joined->communicates()) continue;  // there is one piece
        consider(strategy, i, best, best_cost);
        if (others.empty() || !shards(strategy)) continue;
        for (const Placement& like : others) {
          Strategy other = with_partition(strategy, like);
          if (!rule_.halos || follow_partition(*rule_.halos, other)) consider(other, i, best, best_cost);
        }
      }
      if (!best) return std::nullopt;
      if (considered_ != nullptr) (*considered_)[best_considered_].chosen = true;
      push(*best);
      choice_.microseconds += best_cost;
      if (best->kernel.empty()) continue;
      kernel_is_of_strategy = true;
      choice_.kernel = best->kernel;
      choice_.joins |= mesh_shape_[i] > 1 && (!best->joined || best->joined->communicates());
    }
    if (!kernel_is_of_strategy) choice_.joins = may_join(choice_.kernel, mesh_shape_);
    return std::move(choice_);
  }

 private:
  // Returns Shards with the partitions other than torch.chunk's that cut inputs on this mesh dimension. A strategy for
  // a factor is valid for any of them.
  Placements other_partitions(std::size_t mesh_dim) const {
    Placements out;
    if (others_ == OtherPartitions::kNone) return out;
    if (others_ == OtherPartitions::kOnSeveralRanks && mesh_shape_[mesh_dim] == 1) return out;
    for (std::size_t j = 0; j < inputs_.size(); ++j) {
      const Placement& p = current_[j][mesh_dim];
      if (!inputs_[j].defined || !p.is_shard() || (p.is_chunks() && p.order() == 0)) continue;
      if (std::ranges::find(out, p.on(0)) == out.end()) out.push_back(p.on(0));
    }
    return out;
  }

  void consider(const Strategy& strategy, std::size_t mesh_dim, std::optional<Strategy>& best, double& best_cost) {
    check_counts(strategy, inputs_.size(), choice_.outputs.size(), "a sharding rule");
    if (!may_throw(strategy)) return weigh(strategy, mesh_dim, best, best_cost);
    try {
      weigh(strategy, mesh_dim, best, best_cost);
    } catch (const std::exception&) {  // a user's partition may throw for a size that it does not cut
      for (Placements& p : choice_.inputs) p.resize(mesh_dim, Replicate());
      for (Placements& p : choice_.outputs) p.resize(mesh_dim, Replicate());
      if (considered_ != nullptr) considered_->push_back({mesh_dim, strategy, 0, "a partition does not cut this size"});
    }
  }

  // Says whether the strategy, or what was chosen before it, cuts by a user's partition.
  bool may_throw(const Strategy& strategy) const {
    const auto may = [](const Placement& p) { return p.is_shard() && !p.partition().exact(); };
    const auto any_may = [&](const Placements& p) { return std::ranges::any_of(p, may); };
    return any_may(strategy.inputs) || any_may(strategy.outputs) || std::ranges::any_of(choice_.inputs, any_may) ||
           std::ranges::any_of(choice_.outputs, any_may);
  }

  void weigh(const Strategy& strategy, std::size_t mesh_dim, std::optional<Strategy>& best, double& best_cost) {
    if (considered_ == nullptr && !keeps_written(strategy, mesh_dim)) return;
    const double cost = cost_of(strategy, mesh_dim);
    const bool better = !best || cost < best_cost;
    if (!better && considered_ == nullptr) return;
    const std::string_view refused = refusal(strategy, mesh_dim);
    if (considered_ != nullptr) considered_->push_back({mesh_dim, strategy, cost, std::string(refused)});
    if (!better || !refused.empty()) return;
    best = strategy;
    best_cost = cost;
    if (considered_ != nullptr) best_considered_ = considered_->size() - 1;
  }

  std::string_view refusal(const Strategy& strategy, std::size_t mesh_dim) {
    if (!keeps_written(strategy, mesh_dim)) return "an input that is written would have to be redistributed";
    if (!cuts_what_it_fits(strategy, mesh_dim))
      return "a partition of a fixed size would cut pieces of another partition";
    if (!commutes_with_chosen(strategy))
      return "its pending reduction does not commute with that of another mesh dimension";
    if (!reduces_by_its_dtype(strategy, mesh_dim)) return "its pending reduction is not defined for the input's dtype";
    if (!goes_with_chosen(strategy)) return "pieces of the result would hold other elements than those of the input";
    return {};
  }

  // Says whether each reduction that an input would be pending by is defined for its dtype: a mean is not for integers,
  // and an extremum not for complex numbers.
  bool reduces_by_its_dtype(const Strategy& strategy, std::size_t mesh_dim) const {
    for (std::size_t j = 0; j < inputs_.size(); ++j) {
      const Placement& to = strategy.inputs[j];
      if (!inputs_[j].defined || !to.is_partial() || to == current_[j][mesh_dim]) continue;
      try {
        to.reduction().check(inputs_[j].dtype, "a sharding rule");
      } catch (const std::invalid_argument&) {
        return false;
      }
    }
    return true;
  }

  bool keeps_written(const Strategy& strategy, std::size_t mesh_dim) const {
    return std::all_of(written_.begin(), written_.end(), [&](const Written& w) {
      const Placement& there = w.computed_in_copy ? strategy.inputs[w.input] : current_[w.input][mesh_dim];
      return strategy.inputs[w.input] == there && (w.output == kNoOutput || strategy.outputs[w.output] == there);
    });
  }

  double cost_of(const Strategy& strategy, std::size_t mesh_dim) const {
    double cost = 0;
    for (std::size_t j = 0; j < inputs_.size(); ++j) {
      if (!inputs_[j].defined) continue;
      const Placement& from = current_[j][mesh_dim];
      const Placement& to = strategy.inputs[j];
      if (from == to) continue;
      cost += kLocalChangeMicroseconds + change_cost(from, to, piece_bytes(j, mesh_dim), inputs_[j].sizes,
                                                     mesh_shape_[mesh_dim], model_.links[mesh_dim]);
      if (mesh_shape_[mesh_dim] > 1 && to.is_partial() && !from.is_replicate()) cost += kLocalChangeMicroseconds;
    }
    cost += halo_cost(strategy, mesh_dim) + joined_cost(strategy, mesh_dim);
    return moves_pieces(strategy, mesh_dim) ? cost + pending_cost(strategy, mesh_dim) : cost;
  }

  // Says whether the strategy communicates pieces, and no input is pending.
  bool moves_pieces(const Strategy& strategy, std::size_t mesh_dim) const {
    bool moves = false;
    for (std::size_t j = 0; j < inputs_.size(); ++j) {
      const Placement& from = current_[j][mesh_dim];
      const Placement& to = strategy.inputs[j];
      if (!inputs_[j].defined || from.is_replicate()) continue;
      if (from.is_partial()) return false;
      moves |= !(from == to) && !to.is_partial();
    }
    return moves;
  }

  // Returns the time to reduce and scatter the results that the strategy leaves pending.
  double pending_cost(const Strategy& strategy, std::size_t mesh_dim) const {
    double cost = 0;
    for (std::size_t k = 0; k < outputs_.size(); ++k) {
      if (!outputs_[k].defined || !strategy.outputs[k].is_partial()) continue;
      const double bytes =
          bytes_of(outputs_[k]) / static_cast<double>(parts_elsewhere(choice_.outputs[k], mesh_shape_, mesh_dim));
      cost += change_cost(strategy.outputs[k], Shard(0), bytes, outputs_[k].sizes, mesh_shape_[mesh_dim],
                          model_.links[mesh_dim]);
    }
    return cost;
  }

  // Returns the time of the one all_to_all that fetches rows of other ranks' pieces.
  double halo_cost(const Strategy& strategy, std::size_t mesh_dim) const {
    if (!rule_.halos || mesh_shape_[mesh_dim] == 1) return 0;
    const double share = fetched_share(*rule_.halos, strategy, mesh_shape_[mesh_dim]);
    if (share == 0) return 0;
    double bytes = 0;
    for (const std::size_t j : rule_.halos->inputs) bytes += share * piece_bytes(j, mesh_dim);
    const Link& link = model_.links[mesh_dim];
    return link.microseconds + bytes / link.bytes_per_microsecond;
  }

  // Returns the time of the collectives that the strategy's kernel runs.
  double joined_cost(const Strategy& strategy, std::size_t mesh_dim) const {
    if (!strategy.joined || !strategy.joined->communicates()) return 0;
    const auto ranks = static_cast<double>(mesh_shape_[mesh_dim]);
    double bytes = 2 * strategy.joined->reduced * (ranks - 1) / ranks + strategy.joined->gathered * (ranks - 1);
    for (std::size_t i = 0; i < mesh_shape_.size(); ++i) {  // cuts of dimensions that are not joined
      const Placement& p = i < choice_.inputs[0].size() ? choice_.inputs[0][i] : current_[0][i];
      if (i != mesh_dim && p.is_shard() && !strategy.inputs[0].is_shard(p.tensor_dim())) {
        bytes /= static_cast<double>(mesh_shape_[i]);
      }
    }
    const Link& link = model_.links[mesh_dim];
    return link.microseconds + bytes / link.bytes_per_microsecond;
  }

  // Returns the bytes of input j that remain after the cuts by the other mesh dimensions.
  double piece_bytes(std::size_t j, std::size_t mesh_dim) const {
    Placements placements = current_[j];
    std::ranges::copy(choice_.inputs[j], placements.begin());
    return bytes_of(inputs_[j]) / static_cast<double>(parts_elsewhere(placements, mesh_shape_, mesh_dim));
  }

  // A partition of a fixed size must cut the whole tensor dimension, alone or together with the mesh dimensions before
  // that have it and are too few for its parts; or it must cut what it cuts now.
  bool cuts_what_it_fits(const Strategy& strategy, std::size_t mesh_dim) const {
    for (std::size_t j = 0; j < inputs_.size(); ++j) {
      const Placement& p = strategy.inputs[j];
      if (!inputs_[j].defined || !p.is_shard() || !p.partition().size() || mesh_shape_[mesh_dim] == 1) continue;
      const Placements& chosen = choice_.inputs[j];
      if (current_[j][mesh_dim] == p && std::equal(chosen.begin(), chosen.end(), current_[j].begin())) continue;
      int64_t parts = 1;
      for (std::size_t i = 0; i < chosen.size(); ++i) {
        if (mesh_shape_[i] == 1 || !chosen[i].is_shard(p.tensor_dim())) continue;
        if (!(chosen[i] == p)) return false;
        parts *= mesh_shape_[i];
      }
      if (parts > 1 && parts >= p.partition().parts().value_or(1)) return false;
    }
    return true;
  }

  bool commutes_with_chosen(const Strategy& strategy) const {
    const auto commute = [](const Placements& chosen, const Placement& next) {
      if (chosen.empty() || !next.is_partial()) return true;
      Placements both = chosen;
      both.push_back(next);
      return partials_commute(both);
    };
    return std::ranges::equal(choice_.inputs, strategy.inputs, commute) &&
           std::ranges::equal(choice_.outputs, strategy.outputs, commute);
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
  const std::vector<TensorInfo>& outputs_;
  const std::vector<Placements>& current_;
  std::span<const int64_t> mesh_shape_;
  const CostModel& model_;
  std::span<const Written> written_;
  const OtherPartitions others_;
  std::vector<Considered>* const considered_;
  std::size_t best_considered_ = 0;
  Strategy replicate_;
  Choice choice_;
};

// Returns the cheapest of these: every input stays as it is, or all are redistributed to Replicate on one mesh
// dimension.
std::optional<Choice> keep_inputs(const OpRule& rule, const std::vector<TensorInfo>& inputs,
                                  const std::vector<Placements>& current, std::span<const int64_t> mesh_shape,
                                  const CostModel& model) {
  const std::string_view kernel = rule.keep_kernel.empty() ? rule.kernel : rule.keep_kernel;
  if (auto outputs = rule.outputs_for(current, mesh_shape)) {
    return Choice{
        .inputs = current, .outputs = *std::move(outputs), .kernel = kernel, .joins = may_join(kernel, mesh_shape)};
  }
  std::optional<Choice> best;
  const Mesh mesh({mesh_shape.begin(), mesh_shape.end()});
  const auto are_layouts = [&](const std::vector<Placements>& all) {
    for (std::size_t j = 0; j < inputs.size(); ++j) {
      if (inputs[j].defined && !is_layout(all[j], mesh, inputs[j].sizes)) return false;
    }
    return true;
  };
  for (std::size_t i = mesh_shape.size(); i-- > 0;) {
    std::vector<Placements> moved = current;
    double microseconds = kLocalChangeMicroseconds;
    for (std::size_t j = 0; j < inputs.size(); ++j) {
      const double bytes =
          inputs[j].defined ? bytes_of(inputs[j]) / static_cast<double>(parts_elsewhere(moved[j], mesh_shape, i)) : 0;
      microseconds += change_cost(moved[j][i], Replicate(), bytes, inputs[j].sizes, mesh_shape[i], model.links[i]);
      moved[j][i] = Replicate();
    }
    if (moved == current || (best && microseconds >= best->microseconds) || !are_layouts(moved)) continue;
    auto outputs = rule.outputs_for(moved, mesh_shape);
    if (!outputs) continue;
    best = Choice{.inputs = std::move(moved),
                  .outputs = *std::move(outputs),
                  .kernel = kernel,
                  .joins = may_join(kernel, mesh_shape),
                  .microseconds = microseconds};
  }
  return best;
}

}  // namespace

std::optional<Choice> choose(const OpRule& rule, const std::vector<TensorInfo>& inputs,
                             const std::vector<TensorInfo>& outputs, const std::vector<Placements>& current,
                             std::span<const int64_t> mesh_shape, const CostModel& model,
                             std::span<const Written> written, std::vector<Considered>* considered) {
  const auto search = [&](OtherPartitions others) {
    if (considered != nullptr) considered->clear();
    return Search(rule, inputs, outputs, current, mesh_shape, model, written, others, considered).run();
  };
  std::optional<Choice> choice = search(OtherPartitions::kAll);
  if (rule.outputs_for && (!choice || choice->microseconds > 0)) {
    std::optional<Choice> kept = keep_inputs(rule, inputs, current, mesh_shape, model);
    if (kept && (!choice || kept->microseconds < choice->microseconds)) {
      for (std::size_t k = 0; considered != nullptr && k < considered->size(); ++k) (*considered)[k].chosen = false;
      return kept;
    }
  }
  // Another partition may have been chosen on only some of the mesh dimensions that must have it together, or for a
  // size that it does not cut.
  const Mesh mesh({mesh_shape.begin(), mesh_shape.end()});
  for (const OtherPartitions others : {OtherPartitions::kOnSeveralRanks, OtherPartitions::kNone}) {
    if (!choice || (are_complete(choice->inputs, inputs, mesh) && are_complete(choice->outputs, outputs, mesh))) break;
    choice = search(others);
  }
  return choice;
}

}  // namespace tessera::rules

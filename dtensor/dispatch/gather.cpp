#include "tessera/dtensor/dispatch/gather.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/ops/rules/rule.h"
#include "tessera/placement/exchange.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/tile_layout.h"

namespace tessera::dispatch {
namespace {

// Says what a rank holds of a tensor along the mesh dimensions that its contract gathers: the whole (also of a tensor
// that is not gathered), a piece, or terms of a pending reduction.
enum class Held { kWhole, kPiece, kTerms };

Held held(const Call& call, const TensorArg& entry) {
  if (entry.spec == nullptr || !detail::is_dtensor(*entry.tensor) || call.writes(entry)) return Held::kWhole;
  const detail::Meta& meta = detail::meta(*entry.tensor);
  if (!is_gathered(meta)) return Held::kWhole;
  const bool cut = std::ranges::any_of(meta.contract->gather_dims, [&](int64_t mesh_dim) {
    return entry.spec->placements[static_cast<std::size_t>(mesh_dim)].is_shard();
  });
  return cut ? Held::kPiece : Held::kTerms;
}

bool is_pointwise(const std::string& rule_name) {
  static const std::set<std::string_view> names = [] {
    std::set<std::string_view> out;
    for (const rules::RuleEntry& entry : rules::pointwise_rules()) out.insert(entry.name);
    return out;
  }();
  return names.contains(rule_name);
}

// Says whether a tensor beside parameters leaves the layout of their elements unchanged: a single number, or in a
// pointwise operator a tensor that is expandable to the parameter; replicated over `mesh_dims`.
bool goes_beside(const Call& call, const TensorArg& entry, const Spec& parameter,
                 const std::vector<int64_t>& mesh_dims) {
  const bool whole = std::ranges::all_of(mesh_dims, [&](int64_t mesh_dim) {
    return entry.spec->placements[static_cast<std::size_t>(mesh_dim)].is_replicate();
  });
  if (!whole) return false;
  return entry.spec->numel() == 1 ||
         (is_pointwise(call.traits.rule_name) && at::is_expandable_to(entry.spec->sizes, parameter.sizes));
}

// Says whether the result follows from parameters, numbers and such tensors alone. `first` is one of the parameters.
bool of_parameters_alone(const Call& call, const TensorArg& first) {
  const std::vector<int64_t>& mesh_dims = detail::meta(*first.tensor).contract->gather_dims;
  return std::ranges::all_of(call.tensors, [&](const TensorArg& entry) {
    if (entry.spec == nullptr) return true;
    if (call.writes(entry)) return false;
    if (held(call, entry) == Held::kWhole) return goes_beside(call, entry, *first.spec, mesh_dims);
    return detail::meta(*entry.tensor).contract->gather_dims == mesh_dims;
  });
}

// Returns the contract of a result computed from the parameter: it is gathered as the parameter is, its communication
// is counted under the parameter's path, and no operator applies it.
ContractPtr derived_from(const ContractPtr& contract) {
  if (contract->derived) return contract;
  Contract out;
  out.derived = true;
  out.path = contract->path;
  out.gather_dims = contract->gather_dims;
  return std::make_shared<const Contract>(std::move(out));
}

bool all_alike(const Call& call, const Spec& spec) {
  return std::ranges::all_of(call.tensors, [&](const TensorArg& entry) {
    return entry.spec == nullptr || (entry.spec->sizes == spec.sizes && entry.spec->placements == spec.placements);
  });
}

// Returns the elements that any coordinate on the mesh dimensions `over` holds, with the other mesh dimensions at
// `base`.
Tile united(const Spec& spec, const MergedDims& over, const std::vector<int64_t>& base) {
  Tile out(spec.sizes.size());
  for (std::size_t dim = 0; dim < out.size(); ++dim) {
    Intervals all;
    for (int64_t i = 0; i < over.size(); ++i) {
      const Tile tile = local_tile(spec.sizes, spec.placements, spec.mesh.mesh().shape(), over.coordinate_of(base, i));
      all.insert(all.end(), tile[dim].begin(), tile[dim].end());
    }
    std::ranges::sort(all, {}, &Interval::begin);
    for (const Interval& next : all) {
      if (out[dim].empty() || out[dim].back().end <= next.begin) append(out[dim], next);
    }
  }
  return out;
}

// Returns placements without the cuts over `mesh_dims`, derived from what each coordinate holds. A partition that these
// mesh dimensions share with others has a part per combined coordinate, so it cannot be dropped on some of them.
Placements derive_without_cuts(const Spec& spec, Placements placements, const std::vector<int64_t>& mesh_dims) {
  const std::vector<int64_t>& mesh_shape = spec.mesh.mesh().shape();
  std::vector<int64_t> cut, cut_shape;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard()) continue;
    cut.push_back(static_cast<int64_t>(i));
    cut_shape.push_back(mesh_shape[i]);
  }
  const MergedDims rest(mesh_shape, cut), over(mesh_shape, mesh_dims);
  const std::vector<int64_t> origin(mesh_shape.size(), 0);
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < rest.size(); ++i) tiles.push_back(united(spec, over, rest.coordinate_of(origin, i)));
  const std::optional<Placements> found = layout_of_tiles(spec.sizes, cut_shape, tiles);
  if (!found) {
    throw std::invalid_argument(
        fmt::format("no placements describe {} without its cuts over data dimensions; take the view of the parameter "
                    "redistributed to Replicate there",
                    to_string(spec)));
  }
  for (std::size_t k = 0; k < cut.size(); ++k) placements[static_cast<std::size_t>(cut[k])] = (*found)[k];
  return placements;
}

// Returns what derive_without_cuts returns. It keeps at most kMost results, by Spec::id, since derive_without_cuts
// looks at the parts of all coordinates.
Placements cached_without_cuts(const Spec& spec, const Placements& placements, const std::vector<int64_t>& mesh_dims) {
  constexpr std::size_t kMost = 1024;
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<uint64_t, std::vector<int64_t>>, Placements>();
  const std::pair key(spec.id, mesh_dims);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known->find(key); found != known->end()) return found->second;
  }
  Placements out = derive_without_cuts(spec, placements, mesh_dims);
  const std::lock_guard lock(mutex);
  if (known->size() >= kMost) known->clear();
  known->emplace(key, out);
  return out;
}

Placements without_cuts(const Spec& spec, const std::vector<int64_t>& mesh_dims) {
  Placements placements = spec.placements;
  for (const int64_t mesh_dim : mesh_dims) placements[static_cast<std::size_t>(mesh_dim)] = Replicate();
  const bool together = std::ranges::any_of(placements, [&](const Placement& p) {
    return p.is_shard() && p.partition().parts() && std::ranges::any_of(mesh_dims, [&](int64_t mesh_dim) {
             return spec.placements[static_cast<std::size_t>(mesh_dim)].is_shard(p.tensor_dim());
           });
  });
  return together ? cached_without_cuts(spec, placements, mesh_dims) : placements;
}

SpecPtr whole_spec(const Call& call, const detail::Meta& meta) {
  const Placements whole = without_cuts(*meta.spec, meta.contract->gather_dims);
  return with_placements(*meta.spec, normalize(whole, meta.spec->mesh.mesh(), meta.spec->ndim(), call.traits.name));
}

at::Tensor gather(const Call& call, const detail::Meta& meta) {
  const SpecPtr to = whole_spec(call, meta);
  const World::Scope scope(meta.spec->mesh.world(), call.traits.name.c_str(), &meta.contract->path);
  if (const auto& schedule = meta.contract->gather_schedule) {
    const at::Tensor piece = schedule->gather(meta.contract->path, meta, *to);
    if (piece.defined()) return detail::wrap(in_memory_order(piece, *to), to);
  }
  return detail::wrap(in_memory_order(redistribute_local(meta.local(), *meta.spec, to->placements), *to), to);
}

// Returns a stand-in of the gathered layout for explanations: one number expanded to all elements.
at::Tensor stand_in(const Call& call, const detail::Meta& meta, std::vector<std::string>& steps) {
  const SpecPtr to = whole_spec(call, meta);
  steps.push_back(fmt::format("{} of {} gathered to {} by {}", to_string(*meta.spec), meta.contract->path,
                              to_string(to->placements),
                              route_between(*meta.spec, to->placements)->plan().to_string()));
  return detail::wrap(at::ones({}, at::TensorOptions(to->dtype).device(to->mesh.device())).expand(to->local_sizes), to);
}

class Gathering {
 public:
  Gathering(Call& call, Decide decide, std::vector<std::string>* steps) : call_(call), decide_(decide), steps_(steps) {}

  DecisionPtr run() {
    const auto first =
        call_.traits.keeps_contract ? call_.tensors.end() : std::ranges::find_if(call_.tensors, [&](const auto& entry) {
          return held(call_, entry) != Held::kWhole;
        });
    if (first == call_.tensors.end()) return decide_(call_);
    if (DecisionPtr there = decide_on_pieces(*first)) return there;
    bring(Held::kPiece);
    DecisionPtr decision = decide_(call_);
    return decision->communicates && bring(Held::kTerms) ? decide_(call_) : decision;
  }

 private:
  // Decides without gathering. Returns nullptr if the call then communicates, or if other tensors than parameters take
  // part and some input would be redistributed.
  DecisionPtr decide_on_pieces(const TensorArg& first) {
    const bool alone = of_parameters_alone(call_, first);
    if (!alone && !all_alike(call_, *first.spec)) return nullptr;
    DecisionPtr decision = decide_(call_);
    if (decision->communicates || (!alone && !decision->moves.empty())) return nullptr;
    if (alone) call_.contract_from_parameters = derived_from(detail::meta(*first.tensor).contract);
    return decision;
  }

  // Gathers the tensors whose held() is `how`; returns whether there were any.
  bool bring(Held how) {
    bool any = false;
    for (TensorArg& entry : call_.tensors) {
      if (held(call_, entry) != how) continue;
      any = true;
      // Reserves room for all, since entries point into the vector.
      if (call_.gathered.empty()) call_.gathered.reserve(call_.tensors.size());
      const detail::Meta& meta = detail::meta(*entry.tensor);
      const bool is_first = call_.first_spec == entry.spec;
      entry.tensor =
          &call_.gathered.emplace_back(steps_ != nullptr ? stand_in(call_, meta, *steps_) : gather(call_, meta));
      detail::meta(*entry.tensor).contract = meta.contract;
      entry.spec = detail::meta(*entry.tensor).spec.get();
      if (is_first) call_.first_spec = entry.spec;
    }
    return any;
  }

  Call& call_;
  const Decide decide_;
  std::vector<std::string>* const steps_;
};

}  // namespace

DecisionPtr decide_gathered(Call& call, Decide decide) { return Gathering(call, decide, nullptr).run(); }

DecisionPtr explain_gathered(Call& call, Decide decide, std::vector<std::string>& steps) {
  return Gathering(call, decide, &steps).run();
}

}  // namespace tessera::dispatch

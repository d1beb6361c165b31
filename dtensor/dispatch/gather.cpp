#include "tessera/dtensor/dispatch/gather.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/dtensor/dispatch/execute.h"
#include "tessera/dtensor/route.h"
#include "tessera/placement/exchange.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/tile_layout.h"

namespace tessera::dispatch {
namespace {

// The contract of a tensor that is to be gathered for this call, or nullptr.
const Contract* gathered(const Call& call, const TensorArg& entry) {
  if (entry.spec == nullptr || !detail::is_dtensor(*entry.tensor)) return nullptr;
  const Contract* const contract = detail::meta(*entry.tensor).contract.get();
  if (contract == nullptr || contract->gathered.empty() || call.writes(entry)) return nullptr;
  const bool cut = std::ranges::any_of(contract->gathered, [&](int64_t mesh_dim) {
    return entry.spec->placements[static_cast<std::size_t>(mesh_dim)].is_shard();
  });
  return cut ? contract : nullptr;
}

bool all_alike(const Call& call, const Spec& spec) {
  return std::ranges::all_of(call.tensors, [&](const TensorArg& entry) {
    return entry.spec == nullptr || (entry.spec->sizes == spec.sizes && entry.spec->placements == spec.placements);
  });
}

// The elements that some of the coordinates in `over` hold, where the other mesh dimensions are at `base`.
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

// Placements without the cuts over `mesh_dims`, from what coordinates hold: a partition that these carry together with others has a
// part for each combined coordinate.
Placements taken_apart(const Spec& spec, Placements placements, const std::vector<int64_t>& mesh_dims) {
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
        fmt::format("no placements say how {} lies without its cuts over data dimensions; take the view of "
                    "the parameter redistributed to Replicate there",
                    to_string(spec)));
  }
  for (std::size_t k = 0; k < cut.size(); ++k) placements[static_cast<std::size_t>(cut[k])] = (*found)[k];
  return placements;
}

Placements without_cuts(const Spec& spec, const std::vector<int64_t>& mesh_dims) {
  Placements placements = spec.placements;
  for (const int64_t mesh_dim : mesh_dims) placements[static_cast<std::size_t>(mesh_dim)] = Replicate();
  const bool together = std::ranges::any_of(placements, [&](const Placement& p) {
    return p.is_shard() && p.partition().parts() && std::ranges::any_of(mesh_dims, [&](int64_t mesh_dim) {
             return spec.placements[static_cast<std::size_t>(mesh_dim)].is_shard(p.tensor_dim());
           });
  });
  return together ? taken_apart(spec, std::move(placements), mesh_dims) : placements;
}

at::Tensor gather(const Call& call, const TensorArg& entry, const Contract& contract) {
  const detail::Meta& meta = detail::meta(*entry.tensor);
  const Placements whole = without_cuts(*meta.spec, contract.gathered);
  const SpecPtr to =
      with_placements(*meta.spec, normalize(whole, meta.spec->mesh.mesh(), meta.spec->ndim(), call.traits.name));
  const World::Scope scope(meta.spec->mesh.world(), call.traits.name.c_str(), &contract.path);
  at::Tensor out = detail::wrap(in_memory_order(redistribute_local(meta.local(), *meta.spec, to->placements), *to), to);
  detail::meta(out).contract = meta.contract;
  return out;
}

}  // namespace

void gather_parameters(Call& call) {
  if (call.traits.rides) return;
  for (TensorArg& entry : call.tensors) {
    const Contract* const contract = gathered(call, entry);
    if (contract == nullptr || all_alike(call, *entry.spec)) continue;
    // Room for all at once: entries point to them.
    if (call.gathered.empty()) call.gathered.reserve(call.tensors.size());
    const bool lead = call.lead == entry.spec;
    entry.tensor = &call.gathered.emplace_back(gather(call, entry, *contract));
    entry.spec = detail::meta(*entry.tensor).spec.get();
    if (lead) call.lead = entry.spec;
  }
}

}  // namespace tessera::dispatch

#include "tessera/placement/layout.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

// Returns the mesh dimensions of size above 1 that cut `tensor_dim`, in the order in which they cut.
std::vector<int64_t> cutting_dims(int64_t tensor_dim, const Placements& placements,
                                  std::span<const int64_t> mesh_shape) {
  std::vector<int64_t> out;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (mesh_shape[i] > 1 && placements[i].is_shard(tensor_dim)) out.push_back(static_cast<int64_t>(i));
  }
  const auto earlier = [&](int64_t a, int64_t b) {
    return placements[static_cast<std::size_t>(a)].order() < placements[static_cast<std::size_t>(b)].order();
  };
  // The order is seldom another, and std::stable_sort allocates.
  if (!std::is_sorted(out.begin(), out.end(), earlier)) std::stable_sort(out.begin(), out.end(), earlier);
  return out;
}

// Checks the mesh dimensions of size 1. They cut nothing, but a partition of several parts there would need more ranks.
void check_lone(const Placements& placements, const Mesh& mesh, std::span<const int64_t> shape,
                const std::string& who) {
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const Placement& lone = placements[i];
    if (mesh.shape()[i] > 1 || !lone.is_shard() || !lone.partition().parts()) continue;
    const auto cuts = cuts_of(lone.tensor_dim(), placements, mesh.shape());
    const auto has_peer = [&](const Cut& cut) { return *cut.partition == lone.partition(); };
    if (std::any_of(cuts.begin(), cuts.end(), has_peer)) continue;
    // Its size is what the other cuts leave, which differs from rank to rank.
    const int64_t size = lone.partition().size().value_or(shape[static_cast<std::size_t>(lone.tensor_dim())]);
    check_partition(lone.partition(), cuts.empty() ? shape[static_cast<std::size_t>(lone.tensor_dim())] : size, 1, who);
  }
}

}  // namespace

std::vector<Cut> cuts_of(int64_t tensor_dim, const Placements& placements, std::span<const int64_t> mesh_shape) {
  std::vector<Cut> out;
  for (const int64_t mesh_dim : cutting_dims(tensor_dim, placements, mesh_shape)) {
    const auto i = static_cast<std::size_t>(mesh_dim);
    const Partition& partition = placements[i].partition();
    const bool joins =
        !out.empty() && *out.back().partition == partition && out.back().parts < partition.parts().value_or(0);
    if (!joins) out.push_back({.partition = &partition, .mesh_dims = {}, .parts = 1});
    out.back().mesh_dims.push_back(mesh_dim);
    out.back().parts *= mesh_shape[i];
  }
  return out;
}

Intervals part_of(int64_t size, const std::vector<Cut>& cuts, std::span<const int64_t> mesh_shape,
                  std::span<const int64_t> coordinate) {
  Intervals part = one_interval(0, size);
  for (const Cut& cut : cuts) {
    int64_t index = 0;
    for (const int64_t mesh_dim : cut.mesh_dims) {
      const auto i = static_cast<std::size_t>(mesh_dim);
      index = index * mesh_shape[i] + coordinate[i];
    }
    Intervals chosen = cut.partition->part(count(part), cut.parts, index);
    part = &cut == cuts.data() ? std::move(chosen) : select(part, chosen);
  }
  return part;
}

Tile local_tile(std::span<const int64_t> shape, const Placements& placements, std::span<const int64_t> mesh_shape,
                std::span<const int64_t> coordinate) {
  Tile tile;
  tile.reserve(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    tile.push_back(part_of(shape[d], cuts_of(static_cast<int64_t>(d), placements, mesh_shape), mesh_shape, coordinate));
  }
  return tile;
}

std::vector<int64_t> shape_of(const Tile& tile) {
  std::vector<int64_t> out;
  out.reserve(tile.size());
  for (const Intervals& intervals : tile) out.push_back(count(intervals));
  return out;
}

std::vector<int64_t> local_shape(std::span<const int64_t> shape, const Placements& placements,
                                 std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate) {
  return shape_of(local_tile(shape, placements, mesh_shape, coordinate));
}

Placements normalize(const Placements& placements, const Mesh& mesh, int64_t ndim, std::string_view who) {
  if (static_cast<int64_t>(placements.size()) != mesh.ndim()) {
    throw std::invalid_argument(fmt::format(
        "{}: {} placements {} for the mesh {}, which has {} dimensions; give one placement per mesh dimension", who,
        placements.size(), to_string(placements), mesh.to_string(), mesh.ndim()));
  }
  Placements out = placements;
  std::set<int64_t> cut;
  for (Placement& placement : out) {
    if (!placement.is_shard()) continue;
    const int64_t dim = placement.tensor_dim();
    if (dim < -ndim || dim >= ndim) {
      throw std::invalid_argument(
          fmt::format("{}: {} is outside a tensor of {} dimensions; its dimensions are [{}, {})", who,
                      to_string(placement), ndim, -ndim, ndim));
    }
    if (dim < 0) placement = placement.on(dim + ndim);
    if (placement.order() != 0) cut.insert(placement.tensor_dim());
  }
  for (const int64_t tensor_dim : cut) {
    const std::vector<int64_t> dims = cutting_dims(tensor_dim, out, mesh.shape());
    for (Placement& placement : out) {
      if (placement.is_shard(tensor_dim)) placement = placement.ordered(0);
    }
    if (std::is_sorted(dims.begin(), dims.end())) continue;
    for (std::size_t k = 0; k < dims.size(); ++k) {
      Placement& placement = out[static_cast<std::size_t>(dims[k])];
      placement = placement.ordered(static_cast<int64_t>(k));
    }
  }
  return out;
}

bool is_layout(const Placements& placements, const Mesh& mesh, std::span<const int64_t> shape) {
  try {
    check_layout(placements, mesh, shape, "");
  } catch (const std::exception&) {  // a user's partition may throw any exception
    return false;
  }
  return true;
}

Placements fitted_around(int64_t mesh_dim, Placements placements, const Mesh& mesh, std::span<const int64_t> shape) {
  const Placement kept = placements.at(static_cast<std::size_t>(mesh_dim));
  const auto replace_others = [&](auto&& replaced, auto&& by) {
    for (std::size_t i = 0; i < placements.size(); ++i) {
      Placement& p = placements[i];
      if (static_cast<int64_t>(i) != mesh_dim && p.is_shard() && replaced(p)) p = by(p);
    }
  };
  if (is_layout(placements, mesh, shape)) return placements;
  replace_others([](const Placement& p) { return p.partition().parts() || p.partition().size(); },
                 [](const Placement& p) { return Shard(p.tensor_dim()).ordered(p.order()); });
  if (is_layout(placements, mesh, shape)) return placements;
  replace_others([&](const Placement& p) { return kept.is_shard(p.tensor_dim()); },
                 [](const Placement&) { return Replicate(); });
  return placements;
}

bool every_cut(int64_t size, std::span<const Cut> cuts,
               c10::function_ref<bool(const Partition&, int64_t size, int64_t parts)> fits) {
  const auto asks = [](const Cut& cut) { return !cut.partition->exact() || cut.partition->size(); };
  std::set<int64_t> sizes = {size};
  for (std::size_t k = 0; k < cuts.size(); ++k) {
    const Cut& cut = cuts[k];
    if (!std::ranges::all_of(sizes, [&](int64_t each) { return fits(*cut.partition, each, cut.parts); })) return false;
    if (std::ranges::none_of(cuts.subspan(k + 1), asks)) continue;  // the later partitions accept any size
    std::set<int64_t> left;
    for (const int64_t each : sizes) {
      for (int64_t i = 0; i < cut.parts; ++i) left.insert(count(cut.partition->part(each, cut.parts, i)));
    }
    sizes = std::move(left);
  }
  return true;
}

void check_layout(const Placements& placements, const Mesh& mesh, std::span<const int64_t> shape,
                  std::string_view who) {
  const auto plain = [](const Placement& p) { return !p.is_shard() || p.is_chunks(); };
  if (std::all_of(placements.begin(), placements.end(), plain)) return;
  const std::string where = fmt::format("{}: {} of shape [{}]", who, to_string(placements), fmt::join(shape, ", "));
  check_lone(placements, mesh, shape, where);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    every_cut(shape[d], cuts_of(static_cast<int64_t>(d), placements, mesh.shape()),
              [&](const Partition& partition, int64_t size, int64_t parts) {
                check_partition(partition, size, parts, where);
                return true;
              });
  }
}

}  // namespace tessera

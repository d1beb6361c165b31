#include "tessera/dtensor/dispatch/halo_exchange.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/redistribute/transfer_batch.h"
#include "tessera/placement/exchange.h"

namespace tessera {
namespace {

// Lists, for every member of the group, what it holds and what it needs of a tensor.
struct Tiles {
  std::vector<Tile> held;
  std::vector<Tile> needed;
};

Tiles tiles_of(const rules::Halos& halos, const Spec& fetched, const Spec& computed, const MergedDims& group) {
  const std::vector<int64_t>& mesh_shape = fetched.mesh.mesh().shape();
  const std::vector<int64_t> here = fetched.mesh.coordinate().value_or(std::vector<int64_t>(mesh_shape.size(), 0));
  Tiles out;
  for (int64_t i = 0; i < group.size(); ++i) {
    const std::vector<int64_t> at = group.coordinate_of(here, i);
    out.held.push_back(local_tile(fetched.sizes, fetched.placements, mesh_shape, at));
    const Tile rows = local_tile(computed.sizes, computed.placements, mesh_shape, at);
    out.needed.push_back(halos.needed(out.held.back(), rows));
  }
  return out;
}

}  // namespace

HaloExchange::HaloExchange(const rules::Halos& halos, const std::vector<SpecPtr>& fetched, const Spec& computed)
    : halos_(halos), most_(halos.dims.size(), 0) {
  const DeviceMesh& mesh = computed.mesh;
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    const Placement& p = computed.placements[static_cast<std::size_t>(i)];
    const bool cuts = p.is_shard() && std::ranges::find(halos.dims, p.tensor_dim()) != halos.dims.end();
    if (cuts && mesh.size(i) > 1) mesh_dims_.push_back(i);
  }
  const MergedDims group(mesh.mesh().shape(), mesh_dims_);
  std::vector<Tiles> tiles;
  tiles.reserve(fetched.size());
  for (const SpecPtr& spec : fetched) tiles.push_back(tiles_of(halos, *spec, computed, group));
  for (const Tiles& each : tiles) {
    for (std::size_t i = 0; i < each.held.size(); ++i) {
      for (std::size_t k = 0; k < halos.dims.size(); ++k) {
        const auto d = static_cast<std::size_t>(halos.dims[k]);
        most_[k] = std::max(most_[k], count(each.needed[i][d]) - overlap(each.needed[i][d], each.held[i][d]));
      }
    }
  }
  communicates_ = std::ranges::any_of(most_, [](int64_t rows) { return rows > 0; });
  if (!mesh.is_member()) return;
  const int64_t me = group.index_of(*mesh.coordinate());
  for (const Tiles& each : tiles) {
    const auto at = static_cast<std::size_t>(me);
    if (communicates_) {
      transfers_.emplace_back(exchange_of_tiles(each.held, each.needed, me), at);
    } else {
      regions_.push_back(Region::within(each.held[at], each.needed[at]));
    }
  }
}

std::vector<at::Tensor> HaloExchange::run(const DeviceMesh& mesh, std::span<const at::Tensor> pieces) const {
  std::vector<at::Tensor> out;
  for (std::size_t i = 0; i < regions_.size(); ++i) out.push_back(regions_[i].read(pieces[i]));
  if (transfers_.empty()) return out;
  TransferBatch::Entries entries;
  for (std::size_t i = 0; i < transfers_.size(); ++i) {
    entries.push_back({.transfer = &transfers_[i], .tensor = transfers_[i].input_of(pieces[i]), .owned = false});
  }
  for (at::Tensor& each : TransferBatch(mesh.merged(mesh_dims_), std::move(entries), WaitTime::kAtOnce).wait())
    out.push_back(std::move(each));
  return out;
}

std::string HaloExchange::to_string() const {
  if (!communicates_) return "no rows of other ranks";
  std::vector<std::string> rows;
  for (std::size_t k = 0; k < most_.size(); ++k) {
    if (most_[k] > 0) rows.push_back(fmt::format("dimension {}: {} at most", halos_.dims[k], most_[k]));
  }
  return fmt::format("rows of other ranks ({}) by all_to_all over mesh dimensions {}", fmt::join(rows, ", "),
                     fmt::join(mesh_dims_, ", "));
}

}  // namespace tessera

#include "tessera/placement/exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

// Holds the source and target tiles of a group's members, and knows which members hold the same source tile.
class Group {
 public:
  // Members with the same source tile have the same `holding`; `copy` numbers them.
  void add(Tile source, Tile target, int64_t holding, int64_t copy) {
    sources_.push_back(std::move(source));
    targets_.push_back(std::move(target));
    holdings_.push_back(holding);
    copies_.push_back(copy);
    num_copies_ = std::max(num_copies_, copy + 1);
  }

  Exchange of(int64_t me) const {
    Exchange out{.source = source(me), .target = target(me), .sends = {}, .receives = {}};
    const Tile nothing(out.source.size());
    for (int64_t peer = 0; peer < std::ssize(sources_); ++peer) {
      const bool gives = peer != me && overlap(out.source, target(peer)) > 0 && sends(me, peer);
      const bool takes = overlap(source(peer), out.target) > 0 && sends(peer, me);
      out.sends.push_back(gives ? intersect(out.source, target(peer)) : nothing);
      out.receives.push_back(takes ? intersect(source(peer), out.target) : nothing);
    }
    return out;
  }

 private:
  const Tile& source(int64_t i) const { return sources_[static_cast<std::size_t>(i)]; }
  const Tile& target(int64_t i) const { return targets_[static_cast<std::size_t>(i)]; }
  int64_t holding(int64_t i) const { return holdings_[static_cast<std::size_t>(i)]; }

  // Says whether `sender`, among the members that hold its tile, is the one that sends to `receiver`: the receivers
  // that need this tile take its copies in turn.
  bool sends(int64_t sender, int64_t receiver) const {
    if (holding(sender) == holding(receiver)) return sender == receiver;
    if (num_copies_ == 1) return true;
    int64_t turn = 0;
    for (int64_t other = 0; other < receiver; ++other) {
      if (holding(other) != holding(sender) && overlap(source(sender), target(other)) > 0) ++turn;
    }
    return turn % num_copies_ == copies_[static_cast<std::size_t>(sender)];
  }

  std::vector<Tile> sources_, targets_;
  std::vector<int64_t> holdings_;
  std::vector<int64_t> copies_;
  int64_t num_copies_ = 1;
};

// Numbers a rank's coordinate over the mesh dimensions that cut, and over those along which copies lie.
struct Numbers {
  int64_t cut = 0;
  int64_t copy = 0;
};
Numbers numbers_of(const Placements& placements, std::span<const int64_t> mesh_dims,
                   std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate) {
  Numbers out;
  for (const int64_t mesh_dim : mesh_dims) {
    const auto d = static_cast<std::size_t>(mesh_dim);
    int64_t& number = placements[d].is_shard() ? out.cut : out.copy;
    number = number * mesh_shape[d] + coordinate[d];
  }
  return out;
}

}  // namespace

MergedDims::MergedDims(std::span<const int64_t> mesh_shape, std::vector<int64_t> mesh_dims)
    : mesh_shape_(mesh_shape.begin(), mesh_shape.end()), mesh_dims_(std::move(mesh_dims)) {
  for (const int64_t mesh_dim : mesh_dims_) size_ *= mesh_shape_[static_cast<std::size_t>(mesh_dim)];
}

int64_t MergedDims::index_of(std::span<const int64_t> coordinate) const {
  int64_t index = 0;
  for (const int64_t mesh_dim : mesh_dims_) {
    const auto d = static_cast<std::size_t>(mesh_dim);
    index = index * mesh_shape_[d] + coordinate[d];
  }
  return index;
}

std::vector<int64_t> MergedDims::coordinate_of(std::vector<int64_t> coordinate, int64_t index) const {
  for (std::size_t k = mesh_dims_.size(); k-- > 0;) {
    const auto d = static_cast<std::size_t>(mesh_dims_[k]);
    coordinate[d] = index % mesh_shape_[d];
    index /= mesh_shape_[d];
  }
  return coordinate;
}

Exchange exchange_of(std::span<const int64_t> shape, const Placements& from, const Placements& to,
                     std::span<const int64_t> mesh_shape, const MergedDims& dims,
                     const std::vector<int64_t>& coordinate) {
  Group group;
  for (int64_t i = 0; i < dims.size(); ++i) {
    const std::vector<int64_t> at = dims.coordinate_of(coordinate, i);
    const Numbers numbers = numbers_of(from, dims.mesh_dims(), mesh_shape, at);
    group.add(local_tile(shape, from, mesh_shape, at), local_tile(shape, to, mesh_shape, at), numbers.cut,
              numbers.copy);
  }
  return group.of(dims.index_of(coordinate));
}

Exchange exchange_between(std::span<const int64_t> shape, const Mesh& from_mesh, const Placements& from,
                          const Mesh& to_mesh, const Placements& to, const std::vector<int64_t>& ranks, int64_t rank) {
  std::vector<int64_t> from_dims(static_cast<std::size_t>(from_mesh.ndim()));
  std::iota(from_dims.begin(), from_dims.end(), 0);
  const Tile nothing(shape.size());
  Group group;
  for (const int64_t member : ranks) {
    const auto before = from_mesh.coordinate_of(member);
    const auto after = to_mesh.coordinate_of(member);
    // A rank that holds nothing gets a number of its own, so that it counts as a copy of no other.
    const Numbers numbers =
        before ? numbers_of(from, from_dims, from_mesh.shape(), *before) : Numbers{.cut = -1 - member, .copy = 0};
    group.add(before ? local_tile(shape, from, from_mesh.shape(), *before) : nothing,
              after ? local_tile(shape, to, to_mesh.shape(), *after) : nothing, numbers.cut, numbers.copy);
  }
  return group.of(std::ranges::find(ranks, rank) - ranks.begin());
}

Exchange exchange_of_tiles(const std::vector<Tile>& sources, const std::vector<Tile>& targets, int64_t me) {
  Group group;
  for (std::size_t i = 0; i < sources.size(); ++i) group.add(sources[i], targets[i], static_cast<int64_t>(i), 0);
  return group.of(me);
}

bool is_in_place(std::span<const int64_t> shape, const Mesh& from_mesh, const Placements& from, const Mesh& to_mesh,
                 const Placements& to) {
  return std::ranges::all_of(to_mesh.ranks(), [&](int64_t rank) {
    const Tile target = local_tile(shape, to, to_mesh.shape(), *to_mesh.coordinate_of(rank));
    const auto before = from_mesh.coordinate_of(rank);
    const int64_t held = before ? overlap(local_tile(shape, from, from_mesh.shape(), *before), target) : 0;
    return held == numel(target);
  });
}

GroupTiles group_tiles_of(std::span<const int64_t> shape, const Placements& to, std::span<const int64_t> mesh_shape,
                          const MergedDims& dims, const std::vector<int64_t>& coordinate) {
  const auto cuts = [&](int64_t mesh_dim) { return to[static_cast<std::size_t>(mesh_dim)].is_shard(); };
  GroupTiles out{.tiles = {local_tile(shape, to, mesh_shape, coordinate)}};
  if (std::ranges::none_of(dims.mesh_dims(), cuts)) return out;
  const Tile own = std::exchange(out.tiles, {}).front();
  for (int64_t i = 0; i < dims.size(); ++i) {
    Tile tile = local_tile(shape, to, mesh_shape, dims.coordinate_of(coordinate, i));
    if (std::ranges::find(out.tiles, tile) == out.tiles.end()) out.tiles.push_back(std::move(tile));
  }
  out.own = static_cast<std::size_t>(std::ranges::find(out.tiles, own) - out.tiles.begin());
  return out;
}

int64_t numel(const Tile& tile) {
  int64_t product = 1;
  for (const Intervals& intervals : tile) product *= count(intervals);
  return product;
}

Tile intersect(const Tile& a, const Tile& b) {
  Tile out;
  out.reserve(a.size());
  for (std::size_t d = 0; d < a.size(); ++d) out.push_back(intersect(a[d], b[d]));
  return out;
}

int64_t overlap(const Tile& a, const Tile& b) {
  int64_t product = 1;
  for (std::size_t d = 0; d < a.size(); ++d) product *= overlap(a[d], b[d]);
  return product;
}

}  // namespace tessera

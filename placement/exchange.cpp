#include "tessera/placement/exchange.h"

#include <utility>

namespace tessera {
namespace {

// The members of a group before and after, and who of them hold the same.
class Group {
 public:
  Group(std::span<const int64_t> shape, const Placements& from, const Placements& to, std::span<const int64_t> mesh_shape,
        const MergedDims& dims, const std::vector<int64_t>& coordinate) {
    for (int64_t i = 0; i < dims.size(); ++i) {
      const std::vector<int64_t> at = dims.coordinate_of(coordinate, i);
      sources_.push_back(local_tile(shape, from, mesh_shape, at));
      targets_.push_back(local_tile(shape, to, mesh_shape, at));
      int64_t cut = 0;
      int64_t copy = 0;
      for (const int64_t mesh_dim : dims.mesh_dims()) {
        const auto d = static_cast<std::size_t>(mesh_dim);
        int64_t& number = from[d].is_shard() ? cut : copy;
        number = number * mesh_shape[d] + at[d];
      }
      holdings_.push_back(cut);
      copies_.push_back(copy);
      num_copies_ = std::max(num_copies_, copy + 1);
    }
  }

  int64_t size() const { return static_cast<int64_t>(sources_.size()); }
  const Tile& source(int64_t i) const { return sources_[static_cast<std::size_t>(i)]; }
  const Tile& target(int64_t i) const { return targets_[static_cast<std::size_t>(i)]; }

  // Whether `sender` is the one of its like that sends to `receiver`: those that need this holding ask its copies in turn.
  bool sends(int64_t sender, int64_t receiver) const {
    if (holding(sender) == holding(receiver)) return sender == receiver;
    if (num_copies_ == 1) return true;
    int64_t turn = 0;
    for (int64_t other = 0; other < receiver; ++other) {
      if (holding(other) != holding(sender) && overlap(source(sender), target(other)) > 0) ++turn;
    }
    return turn % num_copies_ == copies_[static_cast<std::size_t>(sender)];
  }

 private:
  int64_t holding(int64_t i) const { return holdings_[static_cast<std::size_t>(i)]; }

  std::vector<Tile> sources_, targets_;
  std::vector<int64_t> holdings_;  // the same number: the same source tile
  std::vector<int64_t> copies_;    // which of those that hold the same
  int64_t num_copies_ = 1;
};

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
                     std::span<const int64_t> mesh_shape, const MergedDims& dims, const std::vector<int64_t>& coordinate) {
  const Group group(shape, from, to, mesh_shape, dims, coordinate);
  const int64_t me = dims.index_of(coordinate);
  const Tile nothing(shape.size());
  Exchange out{.source = group.source(me), .target = group.target(me), .sends = {}, .receives = {}};
  for (int64_t peer = 0; peer < group.size(); ++peer) {
    const bool sends = peer != me && group.sends(me, peer);
    const bool receives = group.sends(peer, me);
    out.sends.push_back(sends ? intersect(out.source, group.target(peer)) : nothing);
    out.receives.push_back(receives ? intersect(group.source(peer), out.target) : nothing);
  }
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

#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/mesh/core/reduce_op.h"
#include "tessera/placement/partition.h"

namespace tessera {

class Reduction;
using ReductionPtr = std::shared_ptr<const Reduction>;

// What the ranks along ONE mesh dimension hold of a tensor:
//   Shard(d)      parts of tensor dimension d, by torch.chunk's rule or another Partition;
//   Replicate()   the whole value on each rank;
//   Partial(op)   a piece on each rank; the value is their Reduction.
// A value. Written as S(0), R, P(sum).
class Placement {
 public:
  enum class Kind : uint8_t { kReplicate, kShard, kPartial };

  Placement() = default;  // Replicate

  static Placement shard(int64_t tensor_dim, PartitionPtr partition = chunks());
  static Placement partial(ReductionPtr reduction);

  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_shard(int64_t tensor_dim) const { return is_shard() && dim_ == tensor_dim; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  // Of the plain reduction by `op`.
  bool is_partial(ReduceOp op) const;

  // ---- of a Shard -----------------------------------------------------------------------------------------------
  // The tensor dimension, as the user wrote it (negative counts from the end until normalized).
  int64_t tensor_dim() const { return dim_; }
  const Partition& partition() const;
  bool is_chunks() const { return is_shard() && what_.get() == chunks().get(); }
  // Of the mesh dimensions that cut one tensor dimension, those of a lower order cut first; of one order, the left one.
  // S(0)@1 on the first mesh dimension and S(0) on the second: the second cuts the tensor, the first its pieces.
  int64_t order() const { return order_; }
  Placement ordered(int64_t order) const;
  // The same cut of another tensor dimension.
  Placement on(int64_t tensor_dim) const;

  // ---- of a Partial ---------------------------------------------------------------------------------------------
  const Reduction& reduction() const;
  ReductionPtr reduction_ptr() const;

  std::size_t hash() const;
  friend bool operator==(const Placement& a, const Placement& b) {
    return a.kind_ == b.kind_ && a.dim_ == b.dim_ && a.order_ == b.order_ &&
           (a.what_ == b.what_ || (a.what_ && b.what_ && *a.what_ == *b.what_));
  }

 private:
  Kind kind_ = Kind::kReplicate;
  int32_t order_ = 0;
  int64_t dim_ = 0;
  std::shared_ptr<const Described> what_;  // the Partition or the Reduction
};

inline Placement Shard(int64_t tensor_dim) { return Placement::shard(tensor_dim); }
inline Placement Shard(int64_t tensor_dim, PartitionPtr partition) {
  return Placement::shard(tensor_dim, std::move(partition));
}
inline Placement Replicate() { return {}; }

// Part i has sizes[i] elements. On several mesh dimensions, written on each: sizes for their combined coordinate, the
// first of them varying slowest.
inline Placement RaggedShard(int64_t tensor_dim, const std::vector<int64_t>& sizes) {
  return Placement::shard(tensor_dim, ragged(sizes));
}
// Blocks of `block` elements dealt out in turn. A fused projection [q; k; v] of 3h rows over n ranks, each with its
// part of every one, is BlockCyclic(0, h / n).
inline Placement BlockCyclic(int64_t tensor_dim, int64_t block) {
  return Placement::shard(tensor_dim, block_cyclic(block));
}
// Part i is parts[i], any ascending intervals; over several mesh dimensions as RaggedShard.
inline Placement IntervalShard(int64_t tensor_dim, const std::vector<Intervals>& parts) {
  return Placement::shard(tensor_dim, interval_lists(parts));
}

Placement Partial(ReduceOp op = ReduceOp::kSum);
inline Placement Partial(ReductionPtr reduction) { return Placement::partial(std::move(reduction)); }
// (sum of |x|^p)^(1/p): how a norm over a sharded dimension waits. See reduction.h.
Placement NormPartial(double p);
// By `op`, of the elements where the mask that from_local is given with the piece is true.
Placement MaskedPartial(ReduceOp op = ReduceOp::kSum);

// One a mesh dimension, outermost first. Several mesh dimensions may shard one tensor dimension: the first splits the
// tensor, the next its pieces (Placement::order says otherwise).
using Placements = std::vector<Placement>;

// "S(0)", "R", "P(sum)", "BC(0,4)", "RS(0,3,5)", "IS(0,0-2+6-8,2-6)", "S(0)@1", "P(norm 2)", "P(masked sum)"; "[S(0),
// R]".
std::string to_string(const Placement& placement);
std::string to_string(const Placements& placements);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

// The inverse of to_string, of the built-in ones. Throws std::invalid_argument that shows the text and the forms there
// are.
Placement parse_placement(std::string_view text);
Placements parse_placements(std::string_view text);

bool any_partial(const Placements& placements);
bool all_replicate(const Placements& placements);
// Replicate in the place of every Partial: how the gradient of such a value is laid out.
Placements without_partial(Placements placements);
// Whether the order in which pending reductions are carried out does not matter: all are of one kind, or all have a
// slope.
bool partials_commute(const Placements& placements);
std::size_t hash_of(const Placements& placements);

}  // namespace tessera

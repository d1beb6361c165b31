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

// Says what the ranks along ONE mesh dimension hold of a tensor:
//   Shard(d)      each rank holds a part of tensor dimension d, by torch.chunk's rule or another Partition;
//   Replicate()   each rank holds the whole value;
//   Partial(op)   each rank holds a piece, and the Reduction of all pieces gives the value.
// It is a value type, and its text is S(0), R, P(sum).
class Placement {
 public:
  enum class Kind : uint8_t { kReplicate, kShard, kPartial };

  Placement() = default;  // Replicate

  // These throw std::invalid_argument on a null pointer. A tensor dimension is checked where the placement is used.
  static Placement shard(int64_t tensor_dim, PartitionPtr partition = chunks());
  static Placement partial(ReductionPtr reduction);

  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_shard(int64_t tensor_dim) const { return is_shard() && dim_ == tensor_dim; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  // Says whether this is the plain reduction by `op`, e.g. Partial(sum).
  bool is_partial(ReduceOp op) const;

  // ---- for a Shard ----------------------------------------------------------------------------------------------
  // The tensor dimension. It is negative (counted from the end) if the user wrote it so, until it is normalized.
  int64_t tensor_dim() const { return dim_; }
  // Throws std::logic_error unless this is a Shard.
  const Partition& partition() const;
  bool is_chunks() const { return is_shard() && what_.get() == chunks().get(); }
  // Decides which mesh dimension cuts first where several cut one tensor dimension: the one of lower order, and of
  // equal orders the left one. With S(0)@1 on the first mesh dimension and S(0) on the second, the second cuts the
  // tensor and the first cuts its pieces.
  int64_t order() const { return order_; }
  // Throws std::invalid_argument unless this is a Shard and the order is from 0 to 65536.
  Placement ordered(int64_t order) const;
  // Returns the same cut of another tensor dimension. Throws std::logic_error unless this is a Shard.
  Placement on(int64_t tensor_dim) const;

  // ---- for a Partial --------------------------------------------------------------------------------------------
  // These throw std::logic_error unless this is a Partial.
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

// Part i has sizes[i] elements. To cut over several mesh dimensions, write it on each of them: the sizes are then those
// of their combined coordinates, the first varying slowest.
inline Placement RaggedShard(int64_t tensor_dim, const std::vector<int64_t>& sizes) {
  return Placement::shard(tensor_dim, ragged(sizes));
}
// Blocks of `block` elements are dealt to the ranks in turn. Where n divides h, BlockCyclic(0, h / n) cuts a fused
// projection [q; k; v] of 3h rows over n ranks so that each rank holds its part of q, of k and of v.
inline Placement BlockCyclic(int64_t tensor_dim, int64_t block) {
  return Placement::shard(tensor_dim, block_cyclic(block));
}
// Part i is parts[i], any set of ascending intervals. Over several mesh dimensions it works as RaggedShard does.
inline Placement IntervalShard(int64_t tensor_dim, const std::vector<Intervals>& parts) {
  return Placement::shard(tensor_dim, interval_lists(parts));
}

Placement Partial(ReduceOp op = ReduceOp::kSum);
inline Placement Partial(ReductionPtr reduction) { return Placement::partial(std::move(reduction)); }
// The value is (sum of |x|^p)^(1/p), which is how a norm over a sharded dimension is pending. See reduction.h.
Placement NormPartial(double p);
// Reduces by `op` the elements where a mask is true; from_local is given that mask with the piece.
Placement MaskedPartial(ReduceOp op = ReduceOp::kSum);

// There is one placement per mesh dimension, outermost first. Several mesh dimensions may shard one tensor dimension:
// the first cuts the tensor, the next cuts its pieces, unless Placement::order says otherwise.
using Placements = std::vector<Placement>;

// Returns "S(0)", "R", "P(sum)", "BC(0,4)", "RS(0,3,5)", "IS(0,0-2+6-8,2-6)", "S(0)@1", "P(norm 2)" or "P(masked sum)"
// for a placement, and "[S(0), R]" for several.
std::string to_string(const Placement& placement);
std::string to_string(const Placements& placements);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

// These are the inverse of to_string, for the placements that this library defines. Throws std::invalid_argument that
// shows the text and lists the forms that it reads.
Placement parse_placement(std::string_view text);
Placements parse_placements(std::string_view text);

bool any_partial(const Placements& placements);
bool all_replicate(const Placements& placements);
// Returns the placements with Replicate in the place of every Partial, which is the layout of the gradient of such a
// value.
Placements without_partial(Placements placements);
// Returns whether pending reductions may be done in any order: all are of one kind, or all have a slope.
bool partials_commute(const Placements& placements);
std::size_t hash_of(const Placements& placements);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/mesh/reduce_op.h"

namespace tessera {

// What the ranks along ONE mesh dimension hold of a tensor:
//   Shard(d)      pieces of tensor dimension d by torch.chunk's rule: equal parts, then one short part, then empty ones;
//   Replicate()   the whole value on each rank;
//   Partial(op)   a term on each rank; the value is their reduction by `op`.
// A value of 16 bytes. Written as S(0), R, P(sum).
class Placement {
 public:
  enum class Kind : uint8_t { kReplicate, kShard, kPartial };

  Placement() = default;  // Replicate

  static Placement shard(int64_t tensor_dim) { return {Kind::kShard, tensor_dim, ReduceOp::kSum}; }
  static Placement replicate() { return {}; }
  static Placement partial(ReduceOp op) { return {Kind::kPartial, 0, op}; }

  Kind kind() const { return kind_; }
  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_shard(int64_t tensor_dim) const { return is_shard() && dim_ == tensor_dim; }
  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  bool is_partial(ReduceOp op) const { return is_partial() && op_ == op; }

  // The tensor dimension of a Shard, as the user wrote it (negative counts from the end until normalized).
  int64_t tensor_dim() const { return dim_; }
  // The reduction of a Partial.
  ReduceOp op() const { return op_; }

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  Placement(Kind kind, int64_t dim, ReduceOp op) : kind_(kind), op_(op), dim_(dim) {}

  Kind kind_ = Kind::kReplicate;
  ReduceOp op_ = ReduceOp::kSum;
  int64_t dim_ = 0;
};

inline Placement Shard(int64_t tensor_dim) { return Placement::shard(tensor_dim); }
inline Placement Replicate() { return Placement::replicate(); }
inline Placement Partial(ReduceOp op = ReduceOp::kSum) { return Placement::partial(op); }

// One a mesh dimension, outermost first. Several mesh dimensions may shard one tensor dimension: the first splits the
// tensor, the next its pieces.
using Placements = std::vector<Placement>;

// "S(0)", "R", "P(sum)"; "[S(0), R]".
std::string to_string(const Placement& placement);
std::string to_string(const Placements& placements);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

// The inverse of to_string. Throws std::invalid_argument that shows the text and the forms there are.
Placement parse_placement(std::string_view text);
Placements parse_placements(std::string_view text);

bool any_partial(const Placements& placements);
bool all_replicate(const Placements& placements);
// Replicate in the place of every Partial: how the gradient of such a value is laid out.
Placements without_partial(Placements placements);
// Whether the order in which pending reductions are carried out does not matter: all are of one kind, or sums and averages.
bool partials_commute(const Placements& placements);

}  // namespace tessera

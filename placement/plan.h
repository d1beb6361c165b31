#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

// One step of a redistribution: some mesh dimensions' placements change together, over the groups that these dimensions
// span.
struct PlanStep {
  enum class Kind : uint8_t {
    kLocal,      // nothing moves: slicing, forming a Partial, scaling the pieces of one linear reduction into another's
    kAllGather,  // every rank of a group gets what all of it have
    kAllToAll,   // every rank sends each what it lacks: any change of sharding, uneven pieces as they are
    kPermute,    // every rank's tile goes to one other
    kAllReduce,  // of what the ranks of a group need together, of which each keeps its own
    kReduceScatter,
  };
  Kind kind = Kind::kLocal;
  std::vector<int64_t> mesh_dims;  // ascending
  Placements from;                 // of all mesh dimensions, before and after
  Placements to;
  int64_t max_bytes = 0;   // received by the rank that receives most
  int64_t peak_bytes = 0;  // live in the rank that has most: source tile, target tile, what is packed and unpacked
  double microseconds = 0;

  friend bool operator==(const PlanStep&, const PlanStep&) = default;
};

// "local", "all_gather", "all_to_all", "permute", "all_reduce", "reduce_scatter": as CommCounter names them.
const char* to_string(PlanStep::Kind kind);

// What a rank sends and receives in one step of all_gather, all_to_all or permute, in elements: one count for each
// member of its group, in the order of their combined coordinate; what stays is not counted. {} for other kinds.
struct Splits {
  std::vector<int64_t> send;
  std::vector<int64_t> receive;
  friend bool operator==(const Splits&, const Splits&) = default;
};

// How a tensor goes from one layout to another: symbolic, the same on every rank, compared by content.
class Plan {
 public:
  Plan(const Mesh& mesh, std::vector<int64_t> shape, at::ScalarType dtype, std::vector<PlanStep> steps);

  const Mesh& mesh() const { return mesh_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  at::ScalarType dtype() const { return dtype_; }
  const std::vector<PlanStep>& steps() const { return steps_; }
  bool communicates() const;

  // Received by the rank that receives most in each step, summed over the steps; by all ranks in all steps; live at
  // most; and the estimated time.
  int64_t max_bytes() const;
  int64_t total_bytes() const;  // looks at every rank
  int64_t peak_bytes() const;
  double microseconds() const;

  // One for each step.
  std::vector<Splits> splits(int64_t rank) const;

  // "all_to_all on tp: [S(0)] -> [S(1)], 96 bytes, 120.05 us", a line a step; "nothing to do".
  std::string to_string() const;
  std::size_t hash() const { return hash_; }
  friend bool operator==(const Plan& a, const Plan& b) {
    return a.hash_ == b.hash_ && a.mesh_ == b.mesh_ && a.shape_ == b.shape_ && a.dtype_ == b.dtype_ &&
           a.steps_ == b.steps_;
  }

 private:
  Mesh mesh_;
  std::vector<int64_t> shape_;
  at::ScalarType dtype_;
  std::vector<PlanStep> steps_;
  std::size_t hash_ = 0;
};

// Throws std::invalid_argument, prefixed with `who`, on sizes below 0 or more elements than can be numbered.
void check_shape(const std::vector<int64_t>& shape, const std::string& who);

// Throws std::invalid_argument, prefixed with `who`, when a Partial in `placements` cannot be formed of `dtype`, or two
// kinds are pending that do not commute.
void check_partials(const Placements& placements, at::ScalarType dtype, const std::string& who);

}  // namespace tessera

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

// Describes one step of a redistribution. The placements of some mesh dimensions change together, by one collective in
// each group of ranks that these dimensions span.
struct PlanStep {
  enum class Kind : uint8_t {
    kLocal,  // no communication: slicing, forming a Partial, scaling the pieces of one linear reduction into another's
    kAllGather,  // every rank of a group receives the pieces of all others
    kAllToAll,   // every rank sends each other rank what it needs: any change of sharding, uneven pieces included
    kPermute,    // every rank's tile is sent to one other rank
    kAllReduce,  // reduces all elements that the group needs; each rank keeps its own
    kReduceScatter,
  };
  Kind kind = Kind::kLocal;
  std::vector<int64_t> mesh_dims;  // ascending
  Placements from;                 // of all mesh dimensions, before the step
  Placements to;                   // of all mesh dimensions, after it
  int64_t max_bytes = 0;           // received by the rank that receives most
  int64_t peak_bytes = 0;          // live on the rank that has most: source tile, target tile, send and receive buffers
  double microseconds = 0;

  friend bool operator==(const PlanStep&, const PlanStep&) = default;
};

// Returns "local", "all_gather", "all_to_all", "permute", "all_reduce" or "reduce_scatter", as CommCounter names them.
const char* to_string(PlanStep::Kind kind);

// Lists what a rank sends and receives, in elements, in one all_gather, all_to_all or permute: one count per member of
// its group, in the order of their combined coordinates. What a rank keeps is not counted. Both lists are empty for the
// other kinds.
struct Splits {
  std::vector<int64_t> send;
  std::vector<int64_t> receive;
  friend bool operator==(const Splits&, const Splits&) = default;
};

// Says how a tensor is redistributed from one layout to another. A plan is the same on every rank and is compared by
// content.
class Plan {
 public:
  Plan(const Mesh& mesh, std::vector<int64_t> shape, at::ScalarType dtype, std::vector<PlanStep> steps);

  const Mesh& mesh() const { return mesh_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  at::ScalarType dtype() const { return dtype_; }
  const std::vector<PlanStep>& steps() const { return steps_; }
  bool communicates() const;

  // These return the bytes received by the rank that receives most in each step, summed over the steps; bytes received
  // by all ranks in all steps; the most bytes live at once on one rank; and the estimated time.
  int64_t max_bytes() const;
  int64_t total_bytes() const;  // computed from every rank's tiles
  int64_t peak_bytes() const;
  double microseconds() const;

  // Returns one Splits per step.
  std::vector<Splits> splits(int64_t rank) const;

  // Returns one line per step, such as "all_to_all on tp: [S(0)] -> [S(1)], 96 bytes, 120.05 us", or "nothing to do".
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

// Throws std::invalid_argument, prefixed with `who`, on a negative size or on more than 1e17 elements.
void check_shape(const std::vector<int64_t>& shape, const std::string& who);

// Throws std::invalid_argument, prefixed with `who`, when two kinds of reductions are pending that do not commute.
void check_commute(const Placements& placements, const std::string& who);
// Throws as check_commute, and when a Partial in `placements` is not defined for `dtype`.
void check_partials(const Placements& placements, at::ScalarType dtype, const std::string& who);

}  // namespace tessera

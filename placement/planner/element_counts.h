#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cut_table.h"

namespace tessera {

// Counts the elements that ranks have and need under layouts, which are numbered in the order in which they are added.
// Only how a layout cuts matters here: what is pending counts as whole. On a large mesh the counts may be those of some
// ranks; see ComparedRanks. An object serves one search and is not thread-safe.
//
// Invariants:
//   - Each layout is legal, and keeps its number until it is the last one and is removed.
//   - ways_ and cutters_ have an entry for each layout and cut dimension.
class ElementCounts {
 public:
  using Node = int32_t;

  // `choices[i]` are the placements, without orders, that mesh dimension i may have. They must outlive this object.
  ElementCounts(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                const std::vector<Placements>& choices, bool sample);
  ElementCounts(const ElementCounts&) = delete;
  ElementCounts& operator=(const ElementCounts&) = delete;

  // ---- the layouts; a cut dimension is a tensor dimension that some choice cuts ---------------------------------
  std::size_t num_cut_dims() const { return tables_.size(); }
  // Returns the number, among the cut dimensions, of the tensor dimension that `shard` cuts.
  std::size_t cut_dim(const Placement& shard) const {
    return cut_dim_of_[static_cast<std::size_t>(shard.tensor_dim())];
  }
  // Adds the layout in which the mesh dimensions sequences[cut_dim] cut in turn, each by the choice of that number.
  // Returns whether it is legal; otherwise nothing is added.
  bool add(const std::vector<std::vector<uint8_t>>& sequences, const std::array<uint8_t, kMostMeshDims>& choices);
  void remove_last();
  // Says whether the same mesh dimensions cut in the same order, by the same choices.
  bool same_cuts(Node a, Node b) const { return std::equal(ways(a), ways(a) + tables_.size(), ways(b)); }
  // Returns the mesh dimensions that cut, in order.
  std::span<const uint8_t> sequence(Node node, std::size_t cut_dim) const {
    return tables_[cut_dim].sequence(ways(node)[cut_dim]);
  }

  // ---- one layout; mesh dimensions are bits ---------------------------------------------------------------------
  const ComparedRanks& ranks() const { return ranks_; }
  double elements() const { return elements_; }                  // of the tensor
  int64_t largest(Node node) const { return of(node).largest; }  // the largest tile, in elements
  // Says whether all ranks have tiles of the same size, made by equal chunks.
  bool is_even(Node node) const { return of(node).even; }

  // ---- two layouts ----------------------------------------------------------------------------------------------
  // Says whether the compared ranks include the largest and the smallest figures of all: all ranks are compared, or
  // both layouts cut into equal chunks.
  bool is_exact(Node from, Node to) const { return ranks_.all || (is_even(from) && is_even(to)); }
  // Says the same of mean_across().
  bool is_exact_across(Node from, Node to) const {
    return ranks_.all || least_held_by_groups(from, to, ranks_.every()) >= 0;
  }
  struct Needs {
    uint32_t mesh_dims = 0;                     // the fewest along which ranks find what they need
    bool whole = true;                          // ranks need everything that is found there
    CutTable::SampledCounts already_held = {};  // elements that each sampled rank has and needs
  };
  Needs needs(Node from, Node to);
  // Returns the mesh dimensions that cut a tensor dimension in `from` and not in `to`. Ranks that differ along one of
  // these alone hold different elements of that tensor dimension and need the same, so these are among needs(). They
  // are found without comparing ranks.
  uint32_t dropped_cuts(Node from, Node to) const {
    if (elements_ == 0) return 0;
    const uint32_t* const a = cutters_.data() + static_cast<std::size_t>(from) * tables_.size();
    const uint32_t* const b = cutters_.data() + static_cast<std::size_t>(to) * tables_.size();
    uint32_t out = 0;
    for (std::size_t t = 0; t < tables_.size(); ++t) out |= a[t] & ~b[t];
    return out;
  }
  // Returns a lower bound on the elements that the rank that misses most does not have, from these mesh dimensions
  // alone.
  int64_t least_missing(Node to, uint32_t dropped) const;
  // Returns how many elements a sampled rank does not have, for the sampled rank that misses more.
  int64_t sampled_missing(Node to, const Needs& needs) const;
  struct Missing {
    int64_t most = 0;  // elements that a rank needs and does not have, for the rank with most
    int64_t live = 0;  // elements of both tiles and twice those that a rank misses, for the rank with most
  };
  Missing missing(Node from, Node to);
  // Counts the elements that a rank receives from ranks that differ from it along some of the mesh dimensions `slow`,
  // in a step between these layouts. Returns the mean over the ranks that agree along all of these, where it is
  // largest.
  double mean_across(Node from, Node to, uint32_t slow);
  // Returns the elements of a rank's two tiles, where the target tile counts 1 + `received` times, for the rank with
  // most.
  double live(Node from, Node to, double received);
  // Counts what the ranks of a group, those along `mesh_dims`, need together. Ranks of a group that differ only along
  // the mesh dimensions outside `split_dims` need the same tile; it counts once. All ranks must be compared.
  struct GroupNeeds {
    int64_t most = 0;  // elements, of the group that needs most
    int64_t live = 0;  // the same and the source tile, for the rank with most
  };
  GroupNeeds group_needs(Node from, Node to, uint32_t mesh_dims, uint32_t split_dims);
  // Returns an upper bound on the elements that a rank has and needs, summed over the groups of ranks that agree on
  // `mesh_dims`, where each group counts as one rank and what is pending counts as whole. On a mesh {2, 2} with
  // `mesh_dims` {0}, ranks that differ only along dimension 1 count as one, so the sum is over two groups.
  double held_by_groups(Node from, Node to, uint32_t mesh_dims) const;
  // Returns the number of elements that `holder` has under `from` and `needer` needs under `to`. The two may be one
  // rank.
  int64_t held_for(Node from, std::size_t holder, Node to, std::size_t needer) const {
    int64_t out = uncut_;
    const int* const a = ways(from);
    const int* const b = ways(to);
    for (std::size_t t = 0; t < tables_.size(); ++t) out *= tables_[t].held_for(a[t], holder, b[t], needer);
    return out;
  }

 private:
  struct Counted {
    uint32_t sharded = 0;                               // the mesh dimensions that cut
    std::array<uint8_t, kMostMeshDims> shards = {};     // [mesh dim]: the cut dimension that it shards
    std::array<int8_t, kMostMeshDims> first_bits = {};  // [mesh dim]: see CutTable::first_bit
    int64_t largest = 0;
    bool even = true;
    CutTable::SampledCounts sampled_sizes = {};
  };
  const Counted& of(Node node) const { return layouts_[static_cast<std::size_t>(node)]; }
  const int* ways(Node node) const { return ways_.data() + static_cast<std::size_t>(node) * tables_.size(); }
  void make_tables(std::span<const int64_t> shape);
  // For two even layouts: returns the number of elements that a compared rank has and needs, if it is the same for all
  // compared ranks; 0 if it is 0 for one of them; and otherwise -1, so that each rank must be looked at.
  int64_t least_held(Node from, Node to);
  // Returns how many elements the ranks that agree along `slow` have and need together, for those that have least;
  // otherwise -1, where a layout is uneven or a size of `slow` is no power of two.
  double least_held_by_groups(Node from, Node to, uint32_t slow) const;
  // Computes how many elements each compared rank has.
  void sizes(Node node, std::vector<int64_t>& out) const;
  // Fills have_ and get_.
  void look_at(Node from, Node to);

  const std::vector<Placements>& choices_;
  const ComparedRanks ranks_;
  std::vector<CutTable> tables_;         // one per cut dimension
  std::vector<std::size_t> cut_dim_of_;  // [tensor dim]; past the end of tables_ if no choice shards it
  std::vector<int> bits_;                // [mesh dim]: the logarithm of its size, rounded down
  double elements_ = 1;
  int64_t uncut_ = 1;  // the product of the sizes of the tensor dimensions that are not cut
  std::vector<Counted> layouts_;
  std::vector<int> ways_;          // [layout][cut dim]
  std::vector<uint32_t> cutters_;  // [layout][cut dim]: the mesh dimensions that cut, a bit for each
  // Hold the elements that each compared rank, or group, has and that it needs; scratch_ holds another number for each.
  std::vector<int64_t> have_, get_, scratch_;
  Node have_of_ = -1;
};

}  // namespace tessera

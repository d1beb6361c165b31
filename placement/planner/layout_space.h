#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cut_table.h"

namespace tessera {

// Numbers the layouts that a plan may pass through: the source, the target and, once grow() has run, the others. In
// each of them a mesh dimension has its placement in the source or the target, Replicate, or torch.chunk's Shard of a
// tensor dimension (of the four that most mesh dimensions divide); pending reductions commute; and mesh dimensions that
// cut one tensor dimension do so in any order. Where that would make more than kMostLayouts, the mesh dimensions cut in
// their own order; where it still would, only the placements of the source and the target and Replicate are used; and
// in the last resort only Replicate. A space serves one search and is not thread-safe.
//
// Invariants:
//   - Node 0 is the source and node 1 the target; no later node equals one of them.
//   - Each node is a legal layout, and keeps its number.
//   - ways_ and cutters_ have an entry for each node and table.
class LayoutSpace {
 public:
  using Node = int32_t;
  static constexpr std::size_t kMostLayouts = 1 << 16;
  static constexpr std::size_t kCompareAll = 64;

  // `from` and `to` are normalized layouts, in which each masked reduction is replaced by the one that it awaits. All
  // ranks are compared on a mesh of up to kCompareAll; on a larger one only some are, if `sample`. See is_exact.
  LayoutSpace(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape, const Placements& from,
              const Placements& to, bool sample);
  LayoutSpace(const LayoutSpace&) = delete;
  LayoutSpace& operator=(const LayoutSpace&) = delete;

  void grow();

  Node from() const { return 0; }
  Node to() const { return 1; }
  Node size() const { return static_cast<Node>(layouts_.size()); }  // nodes are numbered [0, size)
  Placements placements_of(Node node) const;                        // normalized

  const ComparedRanks& ranks() const { return ranks_; }
  // Says whether all ranks have tiles of the same size, made by equal chunks.
  bool is_even(Node node) const { return at(node).even; }
  // Says whether the compared ranks include the largest and the smallest figures of all: all ranks are compared, or
  // both layouts cut into equal chunks.
  bool is_exact(Node from, Node to) const;
  std::size_t mesh_ndim() const { return ranks_.mesh_shape.size(); }
  double elements() const { return elements_; }  // of the tensor
  // Returns the product of the sizes of these mesh dimensions.
  int64_t ranks_of(uint32_t mesh_dims) const { return ranks_of_[mesh_dims]; }

  // ---- one layout; mesh dimensions are bits ---------------------------------------------------------------------
  uint32_t sharded(Node node) const { return at(node).sharded; }
  uint32_t pending(Node node) const { return at(node).pending; }
  uint32_t replicated(Node node) const { return every_ & ~sharded(node) & ~pending(node); }
  int64_t largest(Node node) const { return at(node).largest; }        // the largest tile, in elements
  const Placement& placement(Node node, std::size_t mesh_dim) const {  // without its order
    return choices_[mesh_dim][at(node).choices[mesh_dim]];
  }
  void sizes(Node node, std::vector<int64_t>& out) const;  // how many elements each compared rank has

  // ---- two layouts ----------------------------------------------------------------------------------------------
  // Returns the mesh dimensions whose placements differ, apart from their orders.
  uint32_t changed(Node from, Node to) const;
  struct Needs {
    uint32_t mesh_dims = 0;  // the fewest along which ranks find what they need
    bool whole = true;       // ranks need everything that is found there
    CutTable::SampledCounts common = {};
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
  // For two even layouts: returns the number of elements that a compared rank has and needs, if it is the same for all
  // compared ranks; 0 if it is 0 for one of them; and otherwise -1, so that common() must be asked.
  int64_t least_common(Node from, Node to);
  // Computes the number of elements that each compared rank has and needs.
  void common(Node from, Node to, std::vector<int64_t>& out) const;
  // Returns an upper bound on the same number, summed over the groups of ranks that agree on `mesh_dims`, where each
  // group counts as one rank and what is pending counts as whole.
  double common_of_groups(Node from, Node to, uint32_t mesh_dims) const;
  // Returns the number of elements that one rank has and another needs.
  int64_t common(Node from, std::size_t sender, Node to, std::size_t receiver) const {
    int64_t out = uncut_;
    const int* const a = ways(from);
    const int* const b = ways(to);
    for (std::size_t t = 0; t < tables_.size(); ++t) out *= tables_[t].common(a[t], sender, b[t], receiver);
    return out;
  }
  // Returns the mesh dimensions along which one reduction is pending in `from` and another in `to`, apart from
  // rescaled().
  uint32_t changed_partials(Node from, Node to) const;
  // Returns the mesh dimensions along which one linear reduction becomes another, for which every rank scales its
  // piece.
  uint32_t rescaled(Node from, Node to) const;
  // Says whether one step can do the reductions that are pending in `from` along these mesh dimensions.
  bool reduce_together(Node from, uint32_t mesh_dims) const;

 private:
  struct Layout {
    uint32_t sharded = 0;
    uint32_t pending = 0;
    std::array<uint8_t, kMostMeshDims> choices = {};
    std::array<uint8_t, kMostMeshDims> shards = {};  // [mesh dim]: the table of the tensor dimension that it shards
    int64_t largest = 0;
    bool even = true;
    CutTable::SampledCounts sampled_sizes = {};
  };
  // Holds a layout under construction: some of the mesh dimensions have their placements.
  struct Draft {
    Layout layout;
    std::vector<std::vector<uint8_t>> sequences;  // for each table
    uint32_t kinds = 0;                           // of pending reductions, a bit for each
  };
  enum class Extent { kAllOrders, kMeshOrder, kEnds, kWhole };

  const Layout& at(Node node) const { return layouts_[static_cast<std::size_t>(node)]; }
  const int* ways(Node node) const { return ways_.data() + static_cast<std::size_t>(node) * tables_.size(); }

  void make_choices(const Placements& from, const Placements& to);
  void make_tables(std::span<const int64_t> shape);
  void make_kinds();
  int kind(std::size_t mesh_dim, std::size_t choice) const { return kinds_[mesh_dim][choice]; }
  Draft draft_of(const Placements& placements) const;
  void add_reduced();
  double count_layouts(Extent extent) const;
  std::size_t choices_to_draw(std::size_t mesh_dim, Extent extent) const {
    if (extent == Extent::kWhole) return 1;
    return extent == Extent::kEnds ? end_choices_[mesh_dim] : choices_[mesh_dim].size();
  }
  std::size_t table(const Placement& shard) const { return table_of_[static_cast<std::size_t>(shard.tensor_dim())]; }
  void draw(Draft& draft, std::size_t mesh_dim, Extent extent);
  void draw_orders(Draft& draft, std::size_t mesh_dim, std::size_t table, Extent extent);
  // Adds the layout if it is legal and neither the source nor the target.
  void finish(const Draft& draft);
  bool put(const Draft& draft);
  bool is_end(Node node) const;

  const ComparedRanks ranks_;
  const uint32_t every_;             // every mesh dimension, a bit for each
  std::vector<int64_t> ranks_of_;    // [mesh dimensions as bits]
  std::vector<Placements> choices_;  // [mesh dim]: Replicate, then the source's, the target's, others; without orders
  std::vector<std::size_t> end_choices_;  // how many of them are Replicate or those of source and target
  std::vector<CutTable> tables_;          // one per tensor dimension that some choice shards
  std::vector<std::size_t> table_of_;     // [tensor dim]; past the end of tables_ if no choice shards it
  std::size_t kind_count_ = 0;
  std::vector<std::vector<int>> kinds_;  // [mesh dim][choice]: the number of the pending reduction, or -1
  std::vector<uint32_t> commute_;        // [kind]: the kinds that commute with it, a bit for each
  std::vector<uint32_t> together_;       // [kind]: the kinds that one step reduces together with it, a bit for each
  double elements_ = 1;
  int64_t uncut_ = 1;  // the product of the sizes of the tensor dimensions without a table
  std::vector<Layout> layouts_;
  std::vector<int> ways_;          // [layout][table]
  std::vector<uint32_t> cutters_;  // [layout][table]: the mesh dimensions that cut, a bit for each
};

}  // namespace tessera

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cut_table.h"

namespace tessera {

// The layouts that a plan may pass through, by number: the source, the target and, once grow() has run, the others.
// Each mesh dimension has its placement in the source or the target, Replicate, or torch.chunk's Shard of a tensor
// dimension (of the four that divide best), pending reductions commute, and mesh dimensions that cut one tensor
// dimension do so in any order. Where that makes more than kMostLayouts, the order is that of the mesh; where these are
// still more, placements are those of the source and the target and Replicate; and then only Replicate everywhere. Made
// for one search; not thread-safe.
class LayoutSpace {
 public:
  using Node = int32_t;
  static constexpr std::size_t kMostLayouts = 1 << 16;
  static constexpr std::size_t kCompareAll = 64;

  // `from` and `to` are normalized layouts; in the place of masked reductions stand those that they await.
  // Compares all ranks of a mesh of up to kCompareAll, on a larger one some if `sample`: see is_exact.
  LayoutSpace(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape, const Placements& from,
              const Placements& to, bool sample);
  LayoutSpace(const LayoutSpace&) = delete;
  LayoutSpace& operator=(const LayoutSpace&) = delete;

  void grow();

  Node from() const { return 0; }
  Node to() const { return 1; }
  Node size() const { return static_cast<Node>(layouts_.size()); }  // nodes are [0, size)
  Placements placements_of(Node node) const;                        // normalized

  const ComparedRanks& ranks() const { return ranks_; }
  // Whether all ranks have tiles of one size, made by equal chunks.
  bool is_even(Node node) const { return at(node).even; }
  // Whether the compared ranks have the extremes of all: they are all, or both layouts cut into equal chunks.
  bool is_exact(Node from, Node to) const;
  std::size_t mesh_ndim() const { return ranks_.mesh_shape.size(); }
  double elements() const { return elements_; }                                // of the tensor
  int64_t ranks_of(uint32_t mesh_dims) const { return ranks_of_[mesh_dims]; }  // the product of their sizes

  // ---- of a layout: mesh dimensions as bits
  // --------------------------------------------------------------------------
  uint32_t sharded(Node node) const { return at(node).sharded; }
  uint32_t pending(Node node) const { return at(node).pending; }
  uint32_t replicated(Node node) const { return every_ & ~sharded(node) & ~pending(node); }
  int64_t largest(Node node) const { return at(node).largest; }        // tile, in elements
  const Placement& placement(Node node, std::size_t mesh_dim) const {  // without its order
    return choices_[mesh_dim][at(node).choices[mesh_dim]];
  }
  void sizes(Node node, std::vector<int64_t>& out) const;  // elements that each compared rank has

  // ---- of two layouts
  // -------------------------------------------------------------------------------------------------
  // Mesh dimensions whose placements differ, orders aside.
  uint32_t changed(Node from, Node to) const;
  struct Needs {
    uint32_t mesh_dims = 0;  // the fewest along which ranks find what they need
    bool whole = true;       // all that is there is needed
    CutTable::SampledCounts common = {};
  };
  Needs needs(Node from, Node to);
  // Mesh dimensions that cut a tensor dimension in `from` and not in `to`. Of ranks that differ along one alone, each
  // has other elements of it than the others and needs the same: so they are among needs(), found without comparing
  // ranks.
  uint32_t dropped_cuts(Node from, Node to) const {
    if (elements_ == 0) return 0;
    const uint32_t* const a = cutters_.data() + static_cast<std::size_t>(from) * tables_.size();
    const uint32_t* const b = cutters_.data() + static_cast<std::size_t>(to) * tables_.size();
    uint32_t out = 0;
    for (std::size_t t = 0; t < tables_.size(); ++t) out |= a[t] & ~b[t];
    return out;
  }
  // At least how many elements the rank that misses most does not have, by these mesh dimensions alone; it may miss
  // more.
  int64_t least_missing(Node to, uint32_t dropped) const;
  // Elements that a sampled rank does not have, of that which misses more.
  int64_t sampled_missing(Node to, const Needs& needs) const;
  // Of two even layouts: elements that the compared rank has and needs of which that is least; -1: only common() tells.
  int64_t least_common(Node from, Node to);
  // Elements that each compared rank has and needs.
  void common(Node from, Node to, std::vector<int64_t>& out) const;
  // The same, summed over the groups of ranks that agree on `mesh_dims`, each taken as one, what is pending as if it
  // were whole; no less.
  double common_of_groups(Node from, Node to, uint32_t mesh_dims) const;
  // Elements that one rank has and another needs.
  int64_t common(Node from, std::size_t sender, Node to, std::size_t receiver) const {
    int64_t out = uncut_;
    const int* const a = ways(from);
    const int* const b = ways(to);
    for (std::size_t t = 0; t < tables_.size(); ++t) out *= tables_[t].common(a[t], sender, b[t], receiver);
    return out;
  }
  // Mesh dimensions along which one reduction is pending in `from` and another in `to`.
  uint32_t changed_partials(Node from, Node to) const;
  // Mesh dimensions along which one linear reduction becomes another: every rank scales its piece.
  uint32_t rescaled(Node from, Node to) const;
  // Whether what is pending in `from` along these mesh dimensions goes in one step.
  bool reduce_together(Node from, uint32_t mesh_dims) const;

 private:
  struct Layout {
    uint32_t sharded = 0;
    uint32_t pending = 0;
    std::array<uint8_t, kMostMeshDims> choices = {};
    std::array<uint8_t, kMostMeshDims> shards = {};  // the table of what it shards
    int64_t largest = 0;
    bool even = true;
    CutTable::SampledCounts sampled_sizes = {};
  };
  // A layout in the making: the mesh dimensions before some have their placements.
  struct Draft {
    Layout layout;
    std::vector<std::vector<uint8_t>> sequences;  // for each table
    uint32_t kinds = 0;                           // of pending reductions
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
  // Adds the layout if it is one, and no end.
  void finish(const Draft& draft);
  bool put(const Draft& draft);
  bool is_end(Node node) const;

  const ComparedRanks ranks_;
  const uint32_t every_;                  // mesh dimension
  std::vector<int64_t> ranks_of_;         // [mesh dimensions]
  std::vector<Placements> choices_;       // for each mesh dimension, without orders; Replicate first, then the ends'
  std::vector<std::size_t> end_choices_;  // how many of them are Replicate or the ends'
  std::vector<CutTable> tables_;          // of the tensor dimensions that some choice shards
  std::vector<std::size_t> table_of_;     // [tensor dim]; past the end of tables_ where none does
  std::size_t kind_count_ = 0;
  std::vector<std::vector<int>> kinds_;  // [mesh dim][choice]: the number of the pending reduction, or -1
  std::vector<uint32_t> commute_;        // [kind]: the kinds that commute with it, a bit for each
  std::vector<uint32_t> together_;       // [kind]: the kinds that go in one step with it
  double elements_ = 1;
  int64_t uncut_ = 1;  // the product of the other tensor dimensions
  std::vector<Layout> layouts_;
  std::vector<int> ways_;          // [layout][table]
  std::vector<uint32_t> cutters_;  // [layout][table]: the mesh dimensions that cut, a bit for each
};

}  // namespace tessera

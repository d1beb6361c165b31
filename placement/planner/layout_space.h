#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/placement.h"
#include "tessera/placement/planner/element_counts.h"

namespace tessera {

// Numbers the layouts that a plan may pass through: the source, the target and, once grow() has run, the others. In
// each of them a mesh dimension has its placement in the source or the target, Replicate, or torch.chunk's Shard of a
// tensor dimension (of the four that most mesh dimensions divide); pending reductions commute; and mesh dimensions that
// cut one tensor dimension do so in any order. Where that could make more than kMostLayouts, the mesh dimensions cut in
// their own order; where it still could, only the placements of the source and the target and Replicate are used; and
// where these would make more than kMostOfEnds, only Replicate. A space serves one search and is not thread-safe.
//
// Invariants:
//   - Node 0 is the source and node 1 the target; no later node equals one of them.
//   - Each node is a legal layout, and keeps its number.
//   - counts() knows the same nodes by the same numbers.
class LayoutSpace {
 public:
  using Node = ElementCounts::Node;
  // The time of a search grows faster than the number of layouts. The placements of source and target may make more,
  // since a plan without them gathers everything.
  static constexpr std::size_t kMostLayouts = 1 << 13;
  static constexpr std::size_t kMostOfEnds = 1 << 16;

  // `from` and `to` are normalized layouts, in which each masked reduction is replaced by the reduction without its
  // mask (Reduction::unmasked). All ranks are compared on a mesh of up to kCompareAll; on a larger one only some are,
  // if `sample`. See ElementCounts::is_exact.
  LayoutSpace(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape, const Placements& from,
              const Placements& to, bool sample);
  LayoutSpace(const LayoutSpace&) = delete;
  LayoutSpace& operator=(const LayoutSpace&) = delete;

  // Adds the layouts between source and target. Called at most once.
  void grow();
  // Returns the source, the target, and the number of layouts, which are numbered [0, size).
  Node from() const { return 0; }
  Node to() const { return 1; }
  Node size() const { return static_cast<Node>(layouts_.size()); }
  // Returns the normalized layout.
  Placements placements_of(Node node) const;
  // Returns how many elements ranks have and need under these layouts.
  ElementCounts& counts() { return counts_; }
  const ElementCounts& counts() const { return counts_; }

  // Return the mesh dimensions of each kind of placement. Every set of mesh dimensions has a bit for each.
  uint32_t sharded(Node node) const { return at(node).sharded; }
  uint32_t pending(Node node) const { return at(node).pending; }
  uint32_t replicated(Node node) const { return every_ & ~sharded(node) & ~pending(node); }
  // Returns the mesh dimensions whose placements differ, apart from their orders.
  uint32_t changed(Node from, Node to) const;
  // Returns the mesh dimensions along which one reduction is pending in `from` and another in `to`, apart from
  // rescaled().
  uint32_t changed_partials(Node from, Node to) const;
  // Returns the mesh dimensions along which one linear reduction becomes another, for which every rank scales its
  // piece.
  uint32_t rescaled(Node from, Node to) const;
  // Returns the mesh dimensions among `embedded` where the only piece that is not neutral is not the value itself, but
  // as many times it as there are pieces (avg).
  uint32_t scaled(Node to, uint32_t embedded) const;
  // Says whether one step can do the reductions that are pending in `from` along these mesh dimensions.
  bool reduce_together(Node from, uint32_t mesh_dims) const;

 private:
  struct Layout {
    uint32_t sharded = 0;
    uint32_t pending = 0;
    std::array<uint8_t, kMostMeshDims> choices = {};
  };
  // Holds a layout that may be added to the space, while its mesh dimensions get their placements one by one.
  struct Candidate {
    Layout layout;
    std::vector<std::vector<uint8_t>> sequences;  // for each cut dimension
    uint32_t kinds = 0;                           // of pending reductions, a bit for each
  };
  // Says which layouts grow() adds.
  enum class Extent {
    kAllOrders,  // those with any choices, where the mesh dimensions that cut one tensor dimension do so in any order
    kMeshOrder,  // those with any choices, where they cut in the order of the mesh
    kEnds,       // those with placements of the source and the target and Replicate, where they cut in that order too
    kWhole,      // the one that is Replicate everywhere
  };

  const Layout& at(Node node) const { return layouts_[static_cast<std::size_t>(node)]; }

  // Returns choices_, and fills end_choices_.
  std::vector<Placements> choices(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                                  const Placements& from, const Placements& to);
  void make_kinds();
  int kind(std::size_t mesh_dim, std::size_t choice) const { return kinds_[mesh_dim][choice]; }
  Candidate candidate_of(const Placements& placements) const;
  void add_reduced();
  double count_layouts(Extent extent) const;
  // Returns how many of the mesh dimension's choices, from the first on, belong to `extent`.
  std::size_t choices_within(std::size_t mesh_dim, Extent extent) const {
    if (extent == Extent::kWhole) return 1;
    return extent == Extent::kEnds ? end_choices_[mesh_dim] : choices_[mesh_dim].size();
  }
  // Adds every layout of `extent` that has the candidate's placements on the mesh dimensions from `mesh_dim` on.
  // enumerate_orders() does so where `mesh_dim` too has its placement, which cuts `cut_dim`, but no place in the order.
  void enumerate(Candidate& candidate, std::size_t mesh_dim, Extent extent);
  void enumerate_orders(Candidate& candidate, std::size_t mesh_dim, std::size_t cut_dim, Extent extent);
  // Adds the layout if it is legal and neither the source nor the target.
  void finish(const Candidate& candidate);
  bool put(const Candidate& candidate);
  bool is_end(Node node) const;

  const uint32_t every_;                   // every mesh dimension, a bit for each
  std::vector<std::size_t> end_choices_;   // [mesh dim]: how many choices are Replicate or those of source and target
  const std::vector<Placements> choices_;  // [mesh dim]: Replicate, the source's, the target's, others; without orders
  ElementCounts counts_;
  std::size_t kind_count_ = 0;
  std::vector<std::vector<int>> kinds_;  // [mesh dim][choice]: the number of the pending reduction, or -1
  std::vector<uint32_t> commute_;        // [kind]: the kinds that commute with it, a bit for each
  uint32_t linear_ = 0;                  // the kinds that have a slope, a bit for each
  // [kind]: the kinds that one step reduces together with it, a bit for each
  std::vector<uint32_t> reducible_together_;
  std::vector<uint32_t> scaled_;  // [kind]: the mesh dimensions where its slope is not 1, a bit for each
  std::vector<Layout> layouts_;
};

}  // namespace tessera

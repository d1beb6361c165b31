#include "tessera/placement/planner/layout_space.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>
#include <set>

#include <c10/util/SmallVector.h>

#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

constexpr std::size_t kMostShards = 4;  // tensor dimensions that intermediate layouts may shard in addition

uint32_t bit(std::size_t i) { return uint32_t{1} << i; }

Placement without_order(const Placement& p) { return p.is_shard() && p.order() != 0 ? p.ordered(0) : p; }

void add(Placements& list, const Placement& p) {
  if (std::ranges::find(list, p) == list.end()) list.push_back(p);
}

// Returns the tensor dimensions that intermediate layouts may shard: those that most mesh dimensions divide, larger
// ones first.
std::vector<int64_t> shardable(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape) {
  std::vector<int64_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), 0);
  const auto rank_of = [&](int64_t d) {
    const int64_t size = shape[static_cast<std::size_t>(d)];
    return std::pair(-std::ranges::count_if(mesh_shape, [&](int64_t n) { return size % n == 0; }), -size);
  };
  std::ranges::stable_sort(dims, {}, rank_of);
  if (dims.size() > kMostShards) dims.resize(kMostShards);
  return dims;
}

// Adds the coordinates of extreme parts: for chunks, those at which the size changes; for other partitions, those of
// the largest and the smallest part.
void add_extremes(const Partition& partition, int64_t size, int64_t parts, std::set<int64_t>& out) {
  if (partition.parts().value_or(parts) != parts || partition.size().value_or(size) != size) return;
  if (&partition == chunks().get()) {
    const int64_t full = size / std::max<int64_t>(chunk_range(size, parts, 0).size(), 1);  // the number of full chunks
    for (const int64_t c : {full - 1, full, full + 1}) {
      if (c >= 0 && c < parts) out.insert(c);
    }
    return;
  }
  std::vector<int64_t> sizes;
  try {
    for (int64_t i = 0; i < parts; ++i) sizes.push_back(count(partition.part(size, parts, i)));
  } catch (const std::exception&) {  // a user's partition, which may not support these sizes
    return;
  }
  const auto [least, most] = std::ranges::minmax_element(sizes);
  out.insert({least - sizes.begin(), most - sizes.begin()});
}

// Returns all ranks; or, on a large mesh, those at the first, second and last coordinates and where one mesh dimension
// alone has the largest and the smallest parts.
ComparedRanks compared(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape, const Placements& from,
                       const Placements& to, bool sample) {
  const int64_t ranks = std::accumulate(mesh_shape.begin(), mesh_shape.end(), int64_t{1}, std::multiplies<>());
  if (!sample || ranks <= static_cast<int64_t>(LayoutSpace::kCompareAll)) return ComparedRanks(mesh_shape);
  std::vector<std::set<int64_t>> some;
  for (std::size_t i = 0; i < mesh_shape.size(); ++i) {
    std::set<int64_t>& here = some.emplace_back(std::set<int64_t>{0, mesh_shape[i] - 1});
    if (mesh_shape[i] > 1) here.insert(1);
    Placements cuts = {from[i], to[i]};
    for (const int64_t d : shardable(shape, mesh_shape)) cuts.push_back(Shard(d));
    for (const Placement& p : cuts) {
      if (p.is_shard())
        add_extremes(p.partition(), shape[static_cast<std::size_t>(p.tensor_dim())], mesh_shape[i], here);
    }
  }
  return ComparedRanks(mesh_shape, some);
}

// Records which bits of the indexes in tensor dimensions are equal.
class EqualBits {
 public:
  struct Bit {
    std::size_t table;
    int place;
    friend bool operator==(const Bit&, const Bit&) = default;
  };

  // Returns whether this equality does not follow from those recorded before.
  bool add(const Bit& a, const Bit& b) {
    const std::size_t x = first(a);
    const std::size_t y = first(b);
    same_[x] = y;
    return x != y;
  }

 private:
  std::size_t first(const Bit& bit) {
    auto at = static_cast<std::size_t>(std::ranges::find(bits_, bit) - bits_.begin());
    if (at == bits_.size()) {
      bits_.push_back(bit);
      same_.push_back(at);
    }
    while (same_[at] != at) at = same_[at];
    return at;
  }

  c10::SmallVector<Bit, 16> bits_;
  c10::SmallVector<std::size_t, 16> same_;  // [bit]: another bit that is equal, or itself
};

}  // namespace

LayoutSpace::LayoutSpace(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape, const Placements& from,
                         const Placements& to, bool sample)
    : ranks_(compared(shape, mesh_shape, from, to, sample)),
      every_(bit(mesh_shape.size()) - 1),
      table_of_(shape.size()) {
  ranks_of_.push_back(1);
  for (const int64_t n : mesh_shape) {
    for (std::size_t others = 0, count = ranks_of_.size(); others < count; ++others)
      ranks_of_.push_back(ranks_of_[others] * n);
  }
  make_choices(from, to);
  for (std::size_t i = 0; i < mesh_ndim(); ++i) {
    if (mesh_shape[i] == 1) continue;
    for (const int64_t d : shardable(shape, mesh_shape)) add(choices_[i], Shard(d));
  }
  make_tables(shape);
  make_kinds();
  put(draft_of(from));
  put(draft_of(to));
}

bool LayoutSpace::is_exact(Node from, Node to) const { return ranks_.all || (is_even(from) && is_even(to)); }

void LayoutSpace::make_choices(const Placements& from, const Placements& to) {
  for (std::size_t i = 0; i < mesh_ndim(); ++i) {
    Placements list = {Replicate()};
    add(list, without_order(from[i]));
    add(list, without_order(to[i]));
    end_choices_.push_back(list.size());
    choices_.push_back(std::move(list));
  }
}

void LayoutSpace::make_tables(std::span<const int64_t> shape) {
  const auto is_cut = [&](std::size_t d) {
    const auto cuts = [d](const Placement& p) { return p.is_shard(static_cast<int64_t>(d)); };
    return std::ranges::any_of(choices_, [&](const Placements& list) { return std::ranges::any_of(list, cuts); });
  };
  for (std::size_t d = 0; d < shape.size(); ++d) {
    elements_ *= static_cast<double>(shape[d]);
    table_of_[d] = shape.size();
    if (is_cut(d)) {
      table_of_[d] = tables_.size();
      tables_.emplace_back(static_cast<int64_t>(d), shape[d], ranks_, choices_);
    } else {
      uncut_ *= shape[d];
    }
  }
}

void LayoutSpace::make_kinds() {
  Placements kinds;
  for (const Placements& list : choices_) {
    for (const Placement& p : list) {
      if (p.is_partial()) add(kinds, p);
    }
  }
  for (const Placements& list : choices_) {
    const auto number = [&](const Placement& p) {
      return p.is_partial() ? static_cast<int>(std::ranges::find(kinds, p) - kinds.begin()) : -1;
    };
    std::ranges::transform(list, std::back_inserter(kinds_.emplace_back()), number);
  }
  kind_count_ = kinds.size();
  for (const Placement& a : kinds) {
    commute_.push_back(0);
    together_.push_back(0);
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      const bool together = a == kinds[k] || (a.reduction().slope(1) && kinds[k].reduction().slope(1));
      if (partials_commute({a, kinds[k]})) commute_.back() |= bit(k);
      if (together) together_.back() |= bit(k);
    }
  }
}

// ---- the layouts ----------------------------------------------------------------------------------------------------

LayoutSpace::Draft LayoutSpace::draft_of(const Placements& placements) const {
  Draft draft;
  draft.sequences.resize(tables_.size());
  std::vector<std::size_t> dims(mesh_ndim());
  std::iota(dims.begin(), dims.end(), 0);
  std::ranges::stable_sort(dims, {},
                           [&](std::size_t i) { return placements[i].is_shard() ? placements[i].order() : 0; });
  for (const std::size_t i : dims) {
    const Placement& p = placements[i];
    draft.layout.choices[i] =
        static_cast<uint8_t>(std::ranges::find(choices_[i], without_order(p)) - choices_[i].begin());
    if (p.is_partial()) draft.layout.pending |= bit(i);
    if (!p.is_shard()) continue;
    draft.layout.sharded |= bit(i);
    draft.sequences[table(p)].push_back(static_cast<uint8_t>(i));
  }
  return draft;
}

// This is an upper bound, since it also counts combinations that are no layouts.
double LayoutSpace::count_layouts(Extent extent) const {
  double out = 1;
  for (std::size_t i = 0; i < mesh_ndim(); ++i) {
    const std::size_t limit = choices_to_draw(i, extent);
    std::vector<std::size_t> cuts(tables_.size() + 1, 0);  // choices that cut each tensor dimension
    for (std::size_t c = 0; c < limit; ++c) {
      if (choices_[i][c].is_shard()) ++cuts[table(choices_[i][c])];
    }
    // The mesh dimensions drawn before may all cut one tensor dimension, and this one may cut before each of them.
    const std::size_t drawn = extent == Extent::kAllOrders ? mesh_ndim() - 1 - i : 0;
    out *= static_cast<double>(limit + drawn * std::ranges::max(cuts));
  }
  return out;
}

void LayoutSpace::grow() {
  const auto most = static_cast<double>(kMostLayouts);
  Extent extent = Extent::kAllOrders;
  if (count_layouts(extent) > most) extent = Extent::kMeshOrder;
  if (count_layouts(extent) > most) extent = Extent::kEnds;
  if (count_layouts(extent) > most) extent = Extent::kWhole;
  constexpr double kAtOnce = 4096;
  const auto count = static_cast<std::size_t>(std::min(count_layouts(extent), kAtOnce));
  layouts_.reserve(count);
  ways_.reserve(count * tables_.size());
  cutters_.reserve(count * tables_.size());
  Draft draft;
  draft.sequences.resize(tables_.size());
  draw(draft, mesh_ndim(), extent);
  if (extent == Extent::kWhole && pending(from()) != 0 && sharded(from()) != 0) add_reduced();
}

// Adds the source with nothing pending. Where only Replicate is left, it is the only step from a source that is pending
// and cut.
void LayoutSpace::add_reduced() {
  Placements reduced = placements_of(from());
  for (Placement& p : reduced) {
    if (p.is_partial()) p = Replicate();
  }
  finish(draft_of(reduced));
}

// Gives the mesh dimensions below `mesh_dim` their placements, from the last to the first.
void LayoutSpace::draw(Draft& draft, std::size_t mesh_dim, Extent extent) {
  if (mesh_dim == 0) return finish(draft);
  const std::size_t i = mesh_dim - 1;
  const uint32_t kinds = draft.kinds;
  for (std::size_t c = 0; c < choices_to_draw(i, extent); ++c) {
    const Placement& p = choices_[i][c];
    draft.layout.choices[i] = static_cast<uint8_t>(c);
    if (p.is_shard()) {
      draw_orders(draft, i, table(p), extent);
    } else if (p.is_replicate()) {
      draw(draft, i, extent);
    } else if ((kinds & ~commute_[static_cast<std::size_t>(kind(i, c))]) == 0) {
      draft.kinds |= bit(static_cast<std::size_t>(kind(i, c)));
      draft.layout.pending |= bit(i);
      draw(draft, i, extent);
      draft.kinds = kinds;
      draft.layout.pending &= ~bit(i);
    }
  }
}

// Does the same where `mesh_dim` cuts a tensor dimension: it cuts first of all, and then at each later place.
void LayoutSpace::draw_orders(Draft& draft, std::size_t mesh_dim, std::size_t table, Extent extent) {
  std::vector<uint8_t>& sequence = draft.sequences[table];
  const std::size_t places = extent == Extent::kAllOrders ? sequence.size() + 1 : 1;
  draft.layout.sharded |= bit(mesh_dim);
  for (std::size_t place = 0; place < places; ++place) {
    sequence.insert(sequence.begin() + static_cast<std::ptrdiff_t>(place), static_cast<uint8_t>(mesh_dim));
    draw(draft, mesh_dim, extent);
    sequence.erase(sequence.begin() + static_cast<std::ptrdiff_t>(place));
  }
  draft.layout.sharded &= ~bit(mesh_dim);
}

void LayoutSpace::finish(const Draft& draft) {
  if (!put(draft)) return;
  if (!is_end(size() - 1)) return;
  layouts_.pop_back();
  ways_.resize(ways_.size() - tables_.size());
  cutters_.resize(ways_.size());
}

bool LayoutSpace::put(const Draft& draft) {
  const std::size_t start = ways_.size();
  Layout layout = draft.layout;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    int way = 0;
    uint32_t cutters = 0;
    for (const uint8_t i : draft.sequences[t]) {
      cutters |= bit(i);
      layout.shards[i] = static_cast<uint8_t>(t);
      way = tables_[t].extended(way, i, draft.layout.choices[i]);
    }
    if (!tables_[t].is_legal(way)) {
      ways_.resize(start);
      cutters_.resize(start);
      return false;
    }
    layout.even = layout.even && tables_[t].is_even(way);
    ways_.push_back(way);
    cutters_.push_back(cutters);
  }
  for (std::size_t r = 0; r < (layout.even ? 1 : ranks_.count()); ++r) {
    int64_t mine = uncut_;
    for (std::size_t t = 0; t < tables_.size(); ++t) mine *= tables_[t].sizes(ways_[start + t])[r];
    layout.largest = std::max(layout.largest, mine);
  }
  layout.sampled_sizes.fill(layout.even ? layout.largest : uncut_);
  if (!layout.even) {
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      const CutTable::Pair& same = tables_[t].pair(ways_[start + t], ways_[start + t]);
      for (std::size_t k = 0; k < layout.sampled_sizes.size(); ++k) layout.sampled_sizes[k] *= same.common[k];
    }
  }
  layouts_.push_back(layout);
  return true;
}

bool LayoutSpace::is_end(Node node) const {
  const auto same = [&](Node end) {
    return at(node).choices == at(end).choices && std::equal(ways(node), ways(node) + tables_.size(), ways(end));
  };
  return same(from()) || same(to());
}

Placements LayoutSpace::placements_of(Node node) const {
  Placements out;
  for (std::size_t i = 0; i < mesh_ndim(); ++i) out.push_back(placement(node, i));
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const auto sequence = tables_[t].sequence(ways(node)[t]);
    if (std::ranges::is_sorted(sequence)) continue;
    for (std::size_t k = 0; k < sequence.size(); ++k)
      out[sequence[k]] = out[sequence[k]].ordered(static_cast<int64_t>(k));
  }
  return out;
}

// ---- two layouts ----------------------------------------------------------------------------------------------------

uint32_t LayoutSpace::changed(Node from, Node to) const {
  uint32_t out = 0;
  for (std::size_t i = 0; i < mesh_ndim(); ++i) out |= at(from).choices[i] != at(to).choices[i] ? bit(i) : 0;
  return out;
}

LayoutSpace::Needs LayoutSpace::needs(Node from, Node to) {
  Needs out;
  out.common.fill(uncut_);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const CutTable::Pair& pair = tables_[t].pair(ways(from)[t], ways(to)[t]);
    out.mesh_dims |= pair.needs;
    out.whole = out.whole && pair.whole;
    for (std::size_t k = 0; k < out.common.size(); ++k) out.common[k] *= pair.common[k];
  }
  return out;
}

int64_t LayoutSpace::least_common(Node from, Node to) {
  int64_t product = uncut_;
  bool alike = true;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const CutTable::Common& each = tables_[t].least_common(ways(from)[t], ways(to)[t]);
    if (each.least == 0) return 0;
    alike = alike && each.alike;
    product *= each.least;
  }
  return alike ? product : -1;
}

// Ranks along mesh dimensions that do not cut in `to` need the same tile, and each holds another part of it. Along a
// mesh dimension that cuts another tensor dimension in `to`, some rank has no more than its share of what all of them
// need in the first tensor dimension, and exactly that share if tiles are even.
int64_t LayoutSpace::least_missing(Node to, uint32_t dropped) const {
  const uint32_t alike = dropped & ~sharded(to);
  const uint32_t one = dropped & (~dropped + 1);
  if (alike == 0 && !is_even(to)) return 0;
  return largest(to) - largest(to) / ranks_of(alike != 0 ? alike : one);
}

int64_t LayoutSpace::sampled_missing(Node to, const Needs& needs) const {
  int64_t most = 0;
  for (std::size_t k = 0; k < needs.common.size(); ++k)
    most = std::max(most, at(to).sampled_sizes[k] - needs.common[k]);
  return most;
}

void LayoutSpace::sizes(Node node, std::vector<int64_t>& out) const {
  out.assign(ranks_.count(), uncut_);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const int64_t* const sizes = tables_[t].sizes(ways(node)[t]);
    for (std::size_t r = 0; r < out.size(); ++r) out[r] *= sizes[r];
  }
}

void LayoutSpace::common(Node from, Node to, std::vector<int64_t>& out) const {
  out.assign(ranks_.count(), uncut_);
  for (std::size_t t = 0; t < tables_.size(); ++t) tables_[t].multiply_common(ways(from)[t], ways(to)[t], out.data());
}

// A rank has and needs an element if the element's index gives the rank's coordinates in both layouts. Where both
// layouts take a coordinate from bits of the index, the two agree if these bits are equal; each such equation that does
// not follow from the earlier ones halves the number of elements.
double LayoutSpace::common_of_groups(Node from, Node to, uint32_t mesh_dims) const {
  const uint32_t both = sharded(from) & sharded(to) & mesh_dims;
  double out = elements_ * static_cast<double>(ranks_of(mesh_dims & ~sharded(from) & ~sharded(to)));
  EqualBits equal;
  for (std::size_t i = 0; both >> i != 0; ++i) {
    if ((both & bit(i)) == 0) continue;
    const std::size_t a = at(from).shards[i];
    const std::size_t b = at(to).shards[i];
    const int first_a = tables_[a].first_bit(ways(from)[a], i);
    const int first_b = tables_[b].first_bit(ways(to)[b], i);
    if (first_a < 0 || first_b < 0) continue;
    for (int k = 0; (ranks_.mesh_shape[i] >> k) > 1; ++k) {
      if (equal.add({a, first_a + k}, {b, first_b + k})) out /= 2;
    }
  }
  return out;
}

uint32_t LayoutSpace::changed_partials(Node from, Node to) const {
  return kind_count_ < 2 ? 0 : pending(from) & pending(to) & changed(from, to) & ~rescaled(from, to);
}

uint32_t LayoutSpace::rescaled(Node from, Node to) const {
  if (kind_count_ < 2) return 0;
  const uint32_t candidates = pending(from) & pending(to) & changed(from, to);
  uint32_t out = 0;
  for (std::size_t i = 0; candidates >> i != 0; ++i) {
    if ((candidates & bit(i)) == 0) continue;
    const auto before = static_cast<std::size_t>(kind(i, at(from).choices[i]));
    const auto after = static_cast<std::size_t>(kind(i, at(to).choices[i]));
    if ((together_[before] & bit(after)) != 0) out |= bit(i);
  }
  return out;
}

bool LayoutSpace::reduce_together(Node from, uint32_t mesh_dims) const {
  if (kind_count_ < 2) return true;
  uint32_t all = 0;
  uint32_t fit = ~uint32_t{0};
  for (std::size_t i = 0; mesh_dims >> i != 0; ++i) {
    if ((mesh_dims & bit(i)) == 0) continue;
    const auto each = static_cast<std::size_t>(kind(i, at(from).choices[i]));
    all |= bit(each);
    fit &= together_[each];
  }
  return (all & ~fit) == 0;
}

}  // namespace tessera

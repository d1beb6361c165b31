#include "tessera/placement/planner/element_counts.h"

#include <algorithm>
#include <bit>

#include <c10/util/SmallVector.h>

namespace tessera {
namespace {

uint32_t bit(std::size_t i) { return uint32_t{1} << i; }

// Records which bits of the indexes in tensor dimensions are equal.
class EqualBits {
 public:
  struct Bit {
    std::size_t cut_dim;
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

ElementCounts::ElementCounts(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                             const std::vector<Placements>& choices, bool sample)
    : choices_(choices), ranks_(compared_ranks(shape, mesh_shape, choices, sample)), cut_dim_of_(shape.size()) {
  for (const int64_t n : mesh_shape) bits_.push_back(std::bit_width(static_cast<uint64_t>(n)) - 1);
  make_tables(shape);
}

void ElementCounts::make_tables(std::span<const int64_t> shape) {
  const auto is_cut = [&](std::size_t d) {
    const auto cuts = [d](const Placement& p) { return p.is_shard(static_cast<int64_t>(d)); };
    return std::ranges::any_of(choices_, [&](const Placements& list) { return std::ranges::any_of(list, cuts); });
  };
  for (std::size_t d = 0; d < shape.size(); ++d) {
    elements_ *= static_cast<double>(shape[d]);
    cut_dim_of_[d] = shape.size();
    if (is_cut(d)) {
      cut_dim_of_[d] = tables_.size();
      tables_.emplace_back(static_cast<int64_t>(d), shape[d], ranks_, choices_);
    } else {
      uncut_ *= shape[d];
    }
  }
}

bool ElementCounts::add(const std::vector<std::vector<uint8_t>>& sequences,
                        const std::array<uint8_t, kMostMeshDims>& choices) {
  const std::size_t start = ways_.size();
  Counted layout;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    int way = 0;
    uint32_t cutters = 0;
    for (const uint8_t i : sequences[t]) {
      cutters |= bit(i);
      layout.shards[i] = static_cast<uint8_t>(t);
      way = tables_[t].extended(way, i, choices[i]);
    }
    if (!tables_[t].is_legal(way)) {
      ways_.resize(start);
      cutters_.resize(start);
      return false;
    }
    layout.even = layout.even && tables_[t].is_even(way);
    for (const uint8_t i : sequences[t]) layout.first_bits[i] = static_cast<int8_t>(tables_[t].first_bit(way, i));
    layout.sharded |= cutters;
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
      for (std::size_t k = 0; k < layout.sampled_sizes.size(); ++k) layout.sampled_sizes[k] *= same.already_held[k];
    }
  }
  layouts_.push_back(layout);
  return true;
}

void ElementCounts::remove_last() {
  layouts_.pop_back();
  ways_.resize(ways_.size() - tables_.size());
  cutters_.resize(ways_.size());
}

// ---- two layouts ----------------------------------------------------------------------------------------------------

ElementCounts::Needs ElementCounts::needs(Node from, Node to) {
  Needs out;
  out.already_held.fill(uncut_);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const CutTable::Pair& pair = tables_[t].pair(ways(from)[t], ways(to)[t]);
    out.mesh_dims |= pair.needs;
    out.whole = out.whole && pair.whole;
    for (std::size_t k = 0; k < out.already_held.size(); ++k) out.already_held[k] *= pair.already_held[k];
  }
  return out;
}

// Ranks along mesh dimensions that do not cut in `to` need the same tile, and each holds another part of it. Along a
// mesh dimension that cuts another tensor dimension in `to`, some rank has no more than its share of what all of them
// need in the first tensor dimension, and exactly that share if tiles are even.
int64_t ElementCounts::least_missing(Node to, uint32_t dropped) const {
  const uint32_t alike = dropped & ~of(to).sharded;
  const uint32_t one = dropped & (~dropped + 1);
  if (alike == 0 && !is_even(to)) return 0;
  return largest(to) - largest(to) / ranks_.ranks_of(alike != 0 ? alike : one);
}

int64_t ElementCounts::sampled_missing(Node to, const Needs& needs) const {
  int64_t most = 0;
  for (std::size_t k = 0; k < needs.already_held.size(); ++k)
    most = std::max(most, of(to).sampled_sizes[k] - needs.already_held[k]);
  return most;
}

int64_t ElementCounts::least_held(Node from, Node to) {
  int64_t product = uncut_;
  bool alike = true;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const CutTable::LeastHeld& each = tables_[t].least_held(ways(from)[t], ways(to)[t]);
    if (each.least == 0) return 0;
    alike = alike && each.alike;
    product *= each.least;
  }
  return alike ? product : -1;
}

void ElementCounts::sizes(Node node, std::vector<int64_t>& out) const {
  out.assign(ranks_.count(), uncut_);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const int64_t* const sizes = tables_[t].sizes(ways(node)[t]);
    for (std::size_t r = 0; r < out.size(); ++r) out[r] *= sizes[r];
  }
}

void ElementCounts::look_at(Node from, Node to) {
  if (from != have_of_) sizes(from, have_);
  have_of_ = from;
  sizes(to, get_);
}

ElementCounts::Missing ElementCounts::missing(Node from, Node to) {
  const int64_t held = is_even(from) && is_even(to) ? least_held(from, to) : -1;
  if (held >= 0) {
    const int64_t most = largest(to) - held;
    return {.most = most, .live = largest(from) + largest(to) + 2 * most};
  }
  look_at(from, to);
  std::vector<int64_t>& already_held = scratch_;
  already_held.assign(ranks_.count(), uncut_);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    tables_[t].multiply_already_held(ways(from)[t], ways(to)[t], already_held.data());
  }
  Missing out;
  for (std::size_t r = 0; r < have_.size(); ++r) {
    const int64_t elements = get_[r] - already_held[r];
    out.most = std::max(out.most, elements);
    out.live = std::max(out.live, have_[r] + get_[r] + 2 * elements);
  }
  return out;
}

// Ranks that agree along `slow` form a group, which receives what it needs and does not have once for each of its ranks
// that need the same.
double ElementCounts::mean_across(Node from, Node to, uint32_t slow) {
  const uint32_t fast = ranks_.every() & ~slow;
  const auto tiles = static_cast<double>(ranks_.ranks_of(fast & of(to).sharded));
  const double held = is_even(to) ? least_held_by_groups(from, to, slow) : -1;
  if (held >= 0) return static_cast<double>(largest(to)) - held / tiles;
  get_.assign(ranks_.num_groups(fast), uncut_);
  std::vector<int64_t>& found = scratch_;
  found.assign(get_.size(), uncut_);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    tables_[t].multiply_held_by_groups(ways(to)[t], ways(to)[t], fast, get_);
    tables_[t].multiply_held_by_groups(ways(from)[t], ways(to)[t], fast, found);
  }
  int64_t most = 0;
  for (std::size_t g = 0; g < get_.size(); ++g) most = std::max(most, get_[g] - found[g]);
  return static_cast<double>(most) / tiles;
}

// A group has and needs an element if bits of the element's index give the group's coordinates in both layouts. Each
// such bit halves the number of elements; if one bit has to be two coordinates, a group of which these differ has none.
double ElementCounts::least_held_by_groups(Node from, Node to, uint32_t slow) const {
  const Counted& a = of(from);
  const Counted& b = of(to);
  int bits = 0;
  for (const Counted* layout : {&a, &b}) {
    for (uint32_t rest = slow & layout->sharded; rest != 0; rest &= rest - 1) {
      const auto i = static_cast<std::size_t>(std::countr_zero(rest));
      if (layout->first_bits[i] < 0) return -1;
      bits += bits_[i];
    }
  }
  for (uint32_t in_a = slow & a.sharded; in_a != 0; in_a &= in_a - 1) {
    const auto i = static_cast<std::size_t>(std::countr_zero(in_a));
    for (uint32_t in_b = slow & b.sharded; in_b != 0; in_b &= in_b - 1) {
      const auto j = static_cast<std::size_t>(std::countr_zero(in_b));
      const int end = std::min(a.first_bits[i] + bits_[i], b.first_bits[j] + bits_[j]);
      const int twice = a.shards[i] == b.shards[j] ? end - std::max(a.first_bits[i], b.first_bits[j]) : 0;
      if (twice <= 0) continue;
      if (i != j || a.first_bits[i] != b.first_bits[j]) return 0;
      bits -= twice;
    }
  }
  return elements_ / static_cast<double>(uint64_t{1} << bits);
}

double ElementCounts::live(Node from, Node to, double received) {
  look_at(from, to);
  double most = 0;
  for (std::size_t r = 0; r < have_.size(); ++r) {
    most = std::max(most, static_cast<double>(have_[r]) + (1 + received) * static_cast<double>(get_[r]));
  }
  return most;
}

ElementCounts::GroupNeeds ElementCounts::group_needs(Node from, Node to, uint32_t mesh_dims, uint32_t split_dims) {
  look_at(from, to);
  std::vector<int64_t>& needed = scratch_;  // for the first rank of each group: what the group needs
  needed.assign(have_.size(), 0);
  for (std::size_t r = 0; r < have_.size(); ++r) {
    if (ranks_.first_of_group(r, mesh_dims & ~split_dims) != r) continue;
    needed[ranks_.first_of_group(r, mesh_dims)] += get_[r];
  }
  GroupNeeds out;
  for (std::size_t r = 0; r < have_.size(); ++r) {
    const int64_t by_group = needed[ranks_.first_of_group(r, mesh_dims)];
    out.most = std::max(out.most, by_group);
    out.live = std::max(out.live, have_[r] + by_group);
  }
  return out;
}

// A rank has and needs an element if the element's index gives the rank's coordinates in both layouts. Where both
// layouts take a coordinate from bits of the index, the two agree if these bits are equal; each such equation that does
// not follow from the earlier ones halves the number of elements.
double ElementCounts::held_by_groups(Node from, Node to, uint32_t mesh_dims) const {
  const uint32_t both = of(from).sharded & of(to).sharded & mesh_dims;
  double out = elements_ * static_cast<double>(ranks_.ranks_of(mesh_dims & ~of(from).sharded & ~of(to).sharded));
  EqualBits equal;
  for (std::size_t i = 0; both >> i != 0; ++i) {
    if ((both & bit(i)) == 0) continue;
    const std::size_t a = of(from).shards[i];
    const std::size_t b = of(to).shards[i];
    const int first_a = of(from).first_bits[i];
    const int first_b = of(to).first_bits[i];
    if (first_a < 0 || first_b < 0) continue;
    for (int k = 0; k < bits_[i]; ++k) {
      if (equal.add({a, first_a + k}, {b, first_b + k})) out /= 2;
    }
  }
  return out;
}

}  // namespace tessera

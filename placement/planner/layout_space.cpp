#include "tessera/placement/planner/layout_space.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

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

// Says whether the terms of a linear reduction are added: such terms may be added to those of another one. Where terms
// of a user's linear reduction are multiplied, they are no multiples of the pieces.
bool is_sum(const Reduction& reduction) { return reduction.op() == ReduceOp::kSum && reduction.slope(1).has_value(); }

}  // namespace

LayoutSpace::LayoutSpace(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape, const Placements& from,
                         const Placements& to, bool sample)
    : every_(bit(mesh_shape.size()) - 1),
      choices_(choices(shape, mesh_shape, from, to)),
      counts_(shape, mesh_shape, choices_, sample) {
  make_kinds();
  for (const Placements* end : {&from, &to}) {
    if (put(candidate_of(*end))) continue;
    throw std::invalid_argument(fmt::format(
        "no plan from {} to {} of shape [{}]: a partition of {} says that it is exact() and cannot cut this "
        "size; let exact() return false, or cut every size",
        to_string(from), to_string(to), fmt::join(shape, ", "), to_string(*end)));
  }
}

std::vector<Placements> LayoutSpace::choices(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                                             const Placements& from, const Placements& to) {
  std::vector<Placements> out;
  for (std::size_t i = 0; i < mesh_shape.size(); ++i) {
    Placements list = {Replicate()};
    add(list, without_order(from[i]));
    add(list, without_order(to[i]));
    end_choices_.push_back(list.size());
    for (const int64_t d : shardable(shape, mesh_shape)) {
      if (mesh_shape[i] > 1) add(list, Shard(d));
    }
    out.push_back(std::move(list));
  }
  return out;
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
  const std::vector<int64_t>& mesh_shape = counts_.ranks().mesh_shape;
  for (const Placement& a : kinds) {
    if (a.reduction().slope(1)) linear_ |= bit(commute_.size());
    commute_.push_back(0);
    reducible_together_.push_back(0);
    scaled_.push_back(0);
    for (std::size_t i = 0; i < mesh_shape.size(); ++i) {
      if (a.reduction().slope(mesh_shape[i]).value_or(1) != 1) scaled_.back() |= bit(i);
    }
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      const bool reducible = a == kinds[k] || (is_sum(a.reduction()) && is_sum(kinds[k].reduction()));
      if (partials_commute({a, kinds[k]})) commute_.back() |= bit(k);
      if (reducible) reducible_together_.back() |= bit(k);
    }
  }
}

// ---- the layouts ----------------------------------------------------------------------------------------------------

LayoutSpace::Candidate LayoutSpace::candidate_of(const Placements& placements) const {
  Candidate candidate;
  candidate.sequences.resize(counts_.num_cut_dims());
  std::vector<std::size_t> dims(choices_.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::ranges::stable_sort(dims, {},
                           [&](std::size_t i) { return placements[i].is_shard() ? placements[i].order() : 0; });
  for (const std::size_t i : dims) {
    const Placement& p = placements[i];
    candidate.layout.choices[i] =
        static_cast<uint8_t>(std::ranges::find(choices_[i], without_order(p)) - choices_[i].begin());
    if (p.is_partial()) candidate.layout.pending |= bit(i);
    if (!p.is_shard()) continue;
    candidate.layout.sharded |= bit(i);
    candidate.sequences[counts_.cut_dim(p)].push_back(static_cast<uint8_t>(i));
  }
  return candidate;
}

// This is an upper bound, since it also counts combinations that are no layouts.
double LayoutSpace::count_layouts(Extent extent) const {
  double out = 1;
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const std::size_t limit = choices_within(i, extent);
    std::vector<std::size_t> cuts(counts_.num_cut_dims() + 1, 0);  // choices that cut each tensor dimension
    for (std::size_t c = 0; c < limit; ++c) {
      if (choices_[i][c].is_shard()) ++cuts[counts_.cut_dim(choices_[i][c])];
    }
    // The mesh dimensions enumerated before may all cut one tensor dimension, and this one may cut before each of them.
    const std::size_t cutters = extent == Extent::kAllOrders ? choices_.size() - 1 - i : 0;
    out *= static_cast<double>(limit + cutters * std::ranges::max(cuts));
  }
  return out;
}

void LayoutSpace::grow() {
  const auto most = static_cast<double>(kMostLayouts);
  Extent extent = Extent::kAllOrders;
  if (count_layouts(extent) > most) extent = Extent::kMeshOrder;
  if (count_layouts(extent) > most) extent = Extent::kEnds;
  if (count_layouts(extent) > static_cast<double>(kMostOfEnds)) extent = Extent::kWhole;
  Candidate candidate;
  candidate.sequences.resize(counts_.num_cut_dims());
  enumerate(candidate, choices_.size(), extent);
  if (extent == Extent::kWhole && pending(from()) != 0 && sharded(from()) != 0) add_reduced();
}

// Adds the source with nothing pending. Where only Replicate is left, it is the only step from a source that is pending
// and cut.
void LayoutSpace::add_reduced() {
  Placements reduced = placements_of(from());
  for (Placement& p : reduced) {
    if (p.is_partial()) p = Replicate();
  }
  finish(candidate_of(reduced));
}

// The mesh dimensions get their placements from the last to the first.
void LayoutSpace::enumerate(Candidate& candidate, std::size_t mesh_dim, Extent extent) {
  if (mesh_dim == 0) return finish(candidate);
  const std::size_t i = mesh_dim - 1;
  const uint32_t kinds = candidate.kinds;
  for (std::size_t c = 0; c < choices_within(i, extent); ++c) {
    const Placement& p = choices_[i][c];
    candidate.layout.choices[i] = static_cast<uint8_t>(c);
    if (p.is_shard()) {
      enumerate_orders(candidate, i, counts_.cut_dim(p), extent);
    } else if (p.is_replicate()) {
      enumerate(candidate, i, extent);
    } else if ((kinds & ~commute_[static_cast<std::size_t>(kind(i, c))]) == 0) {
      candidate.kinds |= bit(static_cast<std::size_t>(kind(i, c)));
      candidate.layout.pending |= bit(i);
      enumerate(candidate, i, extent);
      candidate.kinds = kinds;
      candidate.layout.pending &= ~bit(i);
    }
  }
}

// `mesh_dim` cuts first of all, and then at each later place.
void LayoutSpace::enumerate_orders(Candidate& candidate, std::size_t mesh_dim, std::size_t cut_dim, Extent extent) {
  std::vector<uint8_t>& sequence = candidate.sequences[cut_dim];
  const std::size_t places = extent == Extent::kAllOrders ? sequence.size() + 1 : 1;
  candidate.layout.sharded |= bit(mesh_dim);
  for (std::size_t place = 0; place < places; ++place) {
    sequence.insert(sequence.begin() + static_cast<std::ptrdiff_t>(place), static_cast<uint8_t>(mesh_dim));
    enumerate(candidate, mesh_dim, extent);
    sequence.erase(sequence.begin() + static_cast<std::ptrdiff_t>(place));
  }
  candidate.layout.sharded &= ~bit(mesh_dim);
}

void LayoutSpace::finish(const Candidate& candidate) {
  if (!put(candidate)) return;
  if (!is_end(size() - 1)) return;
  layouts_.pop_back();
  counts_.remove_last();
}

bool LayoutSpace::put(const Candidate& candidate) {
  if (!counts_.add(candidate.sequences, candidate.layout.choices)) return false;
  layouts_.push_back(candidate.layout);
  return true;
}

bool LayoutSpace::is_end(Node node) const {
  const auto same = [&](Node end) { return at(node).choices == at(end).choices && counts_.same_cuts(node, end); };
  return same(from()) || same(to());
}

Placements LayoutSpace::placements_of(Node node) const {
  Placements out;
  for (std::size_t i = 0; i < choices_.size(); ++i) out.push_back(choices_[i][at(node).choices[i]]);
  for (std::size_t t = 0; t < counts_.num_cut_dims(); ++t) {
    const auto sequence = counts_.sequence(node, t);
    if (std::ranges::is_sorted(sequence)) continue;
    for (std::size_t k = 0; k < sequence.size(); ++k)
      out[sequence[k]] = out[sequence[k]].ordered(static_cast<int64_t>(k));
  }
  return out;
}

// ---- two layouts ----------------------------------------------------------------------------------------------------

uint32_t LayoutSpace::changed(Node from, Node to) const {
  uint32_t out = 0;
  for (std::size_t i = 0; i < choices_.size(); ++i) out |= at(from).choices[i] != at(to).choices[i] ? bit(i) : 0;
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
    if ((linear_ & bit(before)) != 0 && (linear_ & bit(after)) != 0) out |= bit(i);
  }
  return out;
}

uint32_t LayoutSpace::scaled(Node to, uint32_t embedded) const {
  uint32_t out = 0;
  for (std::size_t i = 0; embedded >> i != 0; ++i) {
    if ((embedded & bit(i)) != 0) out |= scaled_[static_cast<std::size_t>(kind(i, at(to).choices[i]))] & bit(i);
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
    fit &= reducible_together_[each];
  }
  return (all & ~fit) == 0;
}

}  // namespace tessera

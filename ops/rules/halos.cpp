#include "tessera/ops/rules/halos.h"

#include <algorithm>

#include <ATen/ceil_div.h>

namespace tessera::rules {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// All empty ranges are returned as the same value.
Interval clipped(int64_t begin, int64_t end, int64_t size) {
  const Interval out = {.begin = std::max<int64_t>(begin, 0), .end = std::min(end, size)};
  return out.size() > 0 ? out : Interval{};
}

bool is_whole(const Intervals& rows, int64_t size) { return count(rows) == size; }

// Returns the position in the operator's input that is the middle of the window of position `o` of its result.
int64_t middle(const Window& w, bool given_wide, int64_t o) {
  const int64_t reach = w.dilation * (w.kernel - 1) / 2;
  const int64_t place = given_wide ? o * w.stride - w.padding + reach : floor_div(o + w.padding - reach, w.stride);
  return std::clamp<int64_t>(place, 0, (given_wide ? w.wide_size : w.narrow_size) - 1);
}

// Returns the partition of the result that follows from the input's partition; nullptr if that does not consist of
// ranges in order.
PartitionPtr followed(const Window& w, bool given_wide, const Partition& given) {
  const int64_t parts = *given.parts();
  const int64_t size = given_wide ? w.wide_size : w.narrow_size;
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < parts; ++i) {
    const Intervals rows = given.part(size, parts, i);
    const int64_t before = ends.empty() ? 0 : ends.back();
    if (rows.size() > 1 || (!rows.empty() && rows[0].begin != before)) return nullptr;
    ends.push_back(rows.empty() ? before : rows[0].end);
  }
  std::vector<int64_t> sizes(ends.size(), 0);
  const int64_t results = given_wide ? w.narrow_size : w.wide_size;
  std::size_t part = 0;
  for (int64_t o = 0; o < results; ++o) {
    while (middle(w, given_wide, o) >= ends[part]) ++part;
    ++sizes[part];
  }
  return ragged(sizes);
}

// Returns the index in halos.dims of the dimension that a placement cuts.
std::optional<std::size_t> cut_dim(const Halos& halos, const Placement& p) {
  if (!p.is_shard()) return std::nullopt;
  const auto found = std::ranges::find(halos.dims, p.tensor_dim());
  if (found == halos.dims.end()) return std::nullopt;
  return static_cast<std::size_t>(found - halos.dims.begin());
}

const Placement& computed_of(const Halos& halos, const Strategy& strategy) {
  return halos.anchor ? strategy.inputs[*halos.anchor] : strategy.outputs[0];
}

bool fits(const Placement& p, int64_t size) { return p.partition().size().value_or(size) == size; }

}  // namespace

Interval Window::span(const Interval& places) const {
  if (places.size() <= 0) return {};
  return {.begin = places.begin * stride - padding,
          .end = (places.end - 1) * stride - padding + dilation * (kernel - 1) + 1};
}

Interval Window::wide_of(const Interval& places) const {
  const Interval all = span(places);
  return clipped(all.begin, all.end, wide_size);
}

Interval Window::narrow_of(const Interval& places) const {
  if (places.size() <= 0) return {};
  const auto first_from = [&](int64_t wide_place) { return at::ceil_div(std::max<int64_t>(wide_place, 0), stride); };
  return clipped(first_from(places.begin + padding - dilation * (kernel - 1)), first_from(places.end + padding),
                 narrow_size);
}

Interval Halos::needed(std::size_t k, const Intervals& held, const Intervals& computed) const {
  if (is_whole(held, fetched_size(k)) && is_whole(computed, computed_size(k)))
    return {.begin = 0, .end = fetched_size(k)};
  const Interval rows = hull(computed);
  return wide ? windows[k].wide_of(rows) : windows[k].narrow_of(rows);
}

Tile Halos::needed(Tile held, const Tile& computed) const {
  for (std::size_t k = 0; k < dims.size(); ++k) {
    const auto d = static_cast<std::size_t>(dims[k]);
    const Interval rows = needed(k, held[d], computed[d]);
    held[d] = one_interval(rows.begin, rows.end);
  }
  return held;
}

Interval hull(const Intervals& rows) {
  return rows.empty() ? Interval{} : Interval{.begin = rows.front().begin, .end = rows.back().end};
}

double fetched_share(const Halos& halos, const Strategy& strategy, int64_t ranks) {
  const Placement& from = strategy.inputs[halos.inputs[0]];
  const Placement& to = computed_of(halos, strategy);
  const auto k = cut_dim(halos, from);
  if (!k || !fits(from, halos.fetched_size(*k)) || !fits(to, halos.computed_size(*k))) return 0;
  int64_t most = 0;
  for (int64_t i = 0; i < ranks; ++i) {
    const Intervals held = from.partition().part(halos.fetched_size(*k), ranks, i);
    const Interval rows = halos.needed(*k, held, to.partition().part(halos.computed_size(*k), ranks, i));
    most = std::max(most, rows.size() - overlap(held, one_interval(rows.begin, rows.end)));
  }
  return static_cast<double>(most) / static_cast<double>(halos.fetched_size(*k));
}

bool follow_partition(const Halos& halos, Strategy& strategy) {
  const auto k = cut_dim(halos, strategy.inputs[halos.inputs[0]]);
  const bool given_wide = halos.anchor.has_value() != halos.wide;
  const Placement given = halos.anchor ? strategy.inputs[*halos.anchor] : strategy.inputs[halos.inputs[0]];
  if (!k || !given.partition().size()) return true;
  const Window& w = halos.windows[*k];
  if (!given.partition().parts() || !fits(given, given_wide ? w.wide_size : w.narrow_size)) return false;
  if (w.wide_size == w.narrow_size) return true;
  const PartitionPtr partition = followed(w, given_wide, given.partition());
  if (partition == nullptr) return false;
  const Placement gives = Shard(given.tensor_dim(), partition).ordered(given.order());
  if (halos.anchor) {
    for (const std::size_t j : halos.inputs) strategy.inputs[j] = gives;
  } else {
    for (Placement& p : strategy.outputs) p = p.is_shard() ? gives : p;
  }
  return true;
}

bool computes_ranges(const Halos& halos, const Placements& fetched, const Placements& computed,
                     std::span<const int64_t> mesh_shape) {
  const auto range = [](const Partition& partition, int64_t size, int64_t parts) {
    if (partition.size().value_or(size) != size) return false;
    for (int64_t i = 0; i < parts && !(partition == *chunks()); ++i) {
      if (partition.part(size, parts, i).size() > 1) return false;
    }
    return true;
  };
  const auto sized = [](const Partition& partition, int64_t size, int64_t) {
    return partition.size().value_or(size) == size;
  };
  for (std::size_t k = 0; k < halos.dims.size(); ++k) {
    if (!every_cut(halos.computed_size(k), cuts_of(halos.dims[k], computed, mesh_shape), range)) return false;
    if (!every_cut(halos.fetched_size(k), cuts_of(halos.dims[k], fetched, mesh_shape), sized)) return false;
  }
  return true;
}

}  // namespace tessera::rules

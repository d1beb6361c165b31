#include "tessera/placement/planner/cut_table.h"

#include <algorithm>
#include <bit>
#include <exception>

namespace tessera {
namespace {

uint32_t bit(std::size_t mesh_dim) { return uint32_t{1} << mesh_dim; }

// Says whether `partition` can cut `size` elements into `parts`; it has the same conditions as check_partition.
bool fits(const Partition& partition, int64_t size, int64_t parts) {
  if (partition.exact()) return partition.parts().value_or(parts) == parts && partition.size().value_or(size) == size;
  check_partition(partition, size, parts, "");
  return true;
}

// Returns the union of disjoint intervals.
Intervals joined(std::vector<Interval> all) {
  std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  Intervals out;
  for (const Interval& interval : all) append(out, interval);
  return out;
}

// Multiplies each number by the number of elements that are in both of two intervals.
void multiply_overlaps(const int64_t* begins_a, const int64_t* sizes_a, const int64_t* begins_b, const int64_t* sizes_b,
                       std::size_t count, int64_t* numbers) {
  for (std::size_t i = 0; i < count; ++i) {
    const int64_t end = std::min(begins_a[i] + sizes_a[i], begins_b[i] + sizes_b[i]);
    numbers[i] *= std::max<int64_t>(end - std::max(begins_a[i], begins_b[i]), 0);
  }
}

}  // namespace

CutTable::CutTable(int64_t tensor_dim, int64_t size, const ComparedRanks& ranks, const std::vector<Placements>& choices)
    : tensor_dim_(tensor_dim), size_(size), ranks_(ranks), choices_(choices) {
  for (const Placements& each : choices_) fan_ = std::max(fan_, each.size());
  ways_.emplace_back().even = size > 0;
  extensions_.assign(choices_.size() * fan_, 0);
  begins_.assign(ranks_.count(), 0);
  sizes_.assign(ranks_.count(), size);
  pairs_.emplace_back();
  least_held_.emplace_back();
}

int CutTable::extended(int way, std::size_t mesh_dim, std::size_t choice) {
  const std::size_t place = (index(way) * choices_.size() + mesh_dim) * fan_ + choice;
  if (extensions_[place] == 0) {
    const int fresh = add(way, mesh_dim, choice);
    extensions_[place] = fresh;
  }
  return extensions_[place];
}

int CutTable::add(int from, std::size_t mesh_dim, std::size_t choice) {
  const auto number = static_cast<int>(ways_.size());
  const int64_t parts = ranks_.mesh_shape[mesh_dim];
  Way way = ways_[index(from)];
  way.intervals.clear();
  way.merged.clear();
  way.groups.clear();
  way.shorter = from;
  way.dims[way.length] = static_cast<uint8_t>(mesh_dim);
  way.choices[way.length++] = static_cast<uint8_t>(choice);
  way.cutters |= bit(mesh_dim);
  const bool chunked = way.legal && way.single && choices_[mesh_dim][choice].is_chunks();
  way.even = way.even && chunked && sizes(from)[0] % parts == 0;
  way.binary = way.binary && std::has_single_bit(static_cast<uint64_t>(parts));
  extensions_.resize(extensions_.size() + choices_.size() * fan_, 0);
  begins_.resize(begins_.size() + ranks_.count(), 0);
  sizes_.resize(sizes_.size() + ranks_.count(), 0);
  pairs_.emplace_back();
  least_held_.emplace_back();
  ways_.push_back(std::move(way));
  if (chunked) {
    cut_chunks(ways_.back(), from, parts);
  } else {
    cut_anyhow(ways_.back());
  }
  return number;
}

// Cuts the one interval that each rank has under `from`.
void CutTable::cut_chunks(const Way& way, int from, int64_t parts) {
  const std::size_t mesh_dim = way.dims[way.length - 1U];
  const std::size_t before = index(from) * ranks_.count();
  const std::size_t after = begins_.size() - ranks_.count();
  for (std::size_t r = 0; r < ranks_.count(); ++r) {
    const Interval chunk = chunk_range(sizes_[before + r], parts, ranks_.coordinates[r][mesh_dim]);
    begins_[after + r] = begins_[before + r] + chunk.begin;
    sizes_[after + r] = chunk.size();
  }
}

// Other mesh dimensions are Replicate.
Placements CutTable::placements_of(const Way& way) const {
  Placements out(ranks_.mesh_shape.size());
  for (uint8_t k = 0; k < way.length; ++k) out[way.dims[k]] = choices_[way.dims[k]][way.choices[k]].ordered(k);
  return out;
}

void CutTable::cut_anyhow(Way& way) {
  const Placements placements = placements_of(way);
  const std::vector<Cut> cuts = cuts_of(tensor_dim_, placements, ranks_.mesh_shape);
  try {
    way.legal = every_cut(size_, cuts, fits);
    if (way.legal) take_parts(way, cuts);
  } catch (const std::exception&) {  // a user's partition, which may not support these sizes
    way.legal = false;
  }
}

void CutTable::take_parts(Way& way, const std::vector<Cut>& cuts) {
  const std::size_t start = begins_.size() - ranks_.count();
  way.single = true;
  for (std::size_t r = 0; r < ranks_.count(); ++r) {
    // A rank has the same part as an earlier one whose coordinates agree in all mesh dimensions that cut.
    std::size_t like = ranks_.all ? ranks_.first_of_group(r, ~way.cutters) : r;
    way.intervals.push_back(like < r ? way.intervals[like]
                                     : part_of(size_, cuts, ranks_.mesh_shape, ranks_.coordinates[r]));
    const Intervals& mine = way.intervals.back();
    begins_[start + r] = mine.empty() ? 0 : mine.front().begin;
    sizes_[start + r] = count(mine);
    way.single = way.single && mine.size() <= 1;
  }
  if (way.single) way.intervals.clear();
}

// ---- two ways -------------------------------------------------------------------------------------------------------

const CutTable::Pair& CutTable::pair(int from, int to) {
  std::vector<Pair>& row = pairs_[index(from)];
  if (row.size() <= index(to)) row.resize(ways_.size());
  if (!row[index(to)].known) {
    Pair found = find_pair(from, to);
    found.known = true;
    found.already_held = {held_for(from, ranks_.count() / 3, to, ranks_.count() / 3),
                          held_for(from, ranks_.count() * 3 / 5, to, ranks_.count() * 3 / 5)};
    row[index(to)] = found;
  }
  return row[index(to)];
}

CutTable::Pair CutTable::find_pair(int from, int to) {
  const Way& a = ways_[index(from)];
  const Way& b = ways_[index(to)];
  if (from == to) return {.needs = 0, .whole = true};
  if (a.even && b.even) return even_pair(a, b);
  Pair out;
  if (ranks_.all) {
    for (int fewest = 0; fewest <= std::popcount(a.cutters); ++fewest) {
      for (uint32_t mesh_dims = 0; mesh_dims <= a.cutters; ++mesh_dims) {
        if ((mesh_dims & ~a.cutters) != 0 || std::popcount(mesh_dims) != fewest) continue;
        out.needs = mesh_dims;
        if (covers(from, mesh_dims, to, out.whole)) return out;
      }
    }
  }
  // The cuts that both ways begin with stay as they are. Everything inside them is needed.
  uint8_t same = 0;
  while (same < a.length && same < b.length && a.dims[same] == b.dims[same] && a.choices[same] == b.choices[same])
    ++same;
  out.needs = 0;
  for (uint8_t k = same; k < a.length; ++k) out.needs |= bit(a.dims[k]);
  out.whole = same == b.length;
  return out;
}

const CutTable::LeastHeld& CutTable::least_held(int from, int to) {
  std::vector<LeastHeld>& row = least_held_[index(from)];
  if (row.size() <= index(to)) row.resize(ways_.size());
  LeastHeld& out = row[index(to)];
  if (out.least >= 0) return out;
  each_held_.assign(ranks_.count(), 1);
  multiply_already_held(from, to, each_held_.data());
  const auto [least, most] = std::ranges::minmax_element(each_held_);
  out = {.least = *least, .alike = *least == *most};
  return out;
}

int64_t CutTable::parts_before(const Way& way, std::size_t mesh_dim) const {
  int64_t parts = 1;
  for (uint8_t k = 0; k < way.length; ++k) {
    if (way.dims[k] == mesh_dim) return parts;
    parts *= ranks_.mesh_shape[way.dims[k]];
  }
  return 0;
}

// Under a cut into equal chunks a rank's coordinate on the mesh dimension is a digit of an element's index. Ranks find
// what they need among the ranks of their own coordinate exactly if that digit has the same weight in both ways.
CutTable::Pair CutTable::even_pair(const Way& a, const Way& b) const {
  Pair out;
  int64_t parts = 1;   // the number of parts made so far by the first way
  int64_t needed = 1;  // the product of the sizes of its mesh dimensions that are needed
  for (uint8_t k = 0; k < a.length; ++k) {
    const int64_t n = ranks_.mesh_shape[a.dims[k]];
    if (parts_before(b, a.dims[k]) != parts) {
      out.needs |= bit(a.dims[k]);
      needed *= n;
    }
    parts *= n;
  }
  int64_t wanted = size_;
  for (uint8_t k = 0; k < b.length; ++k) wanted /= ranks_.mesh_shape[b.dims[k]];
  out.whole = size_ / parts * needed == wanted;
  return out;
}

int CutTable::first_bit(int way, std::size_t mesh_dim) const {
  const Way& it = ways_[index(way)];
  const int64_t parts = it.even && it.binary ? parts_before(it, mesh_dim) : 0;
  return parts == 0 ? -1 : std::countr_zero(static_cast<uint64_t>(parts));
}

bool CutTable::covers(int from, uint32_t mesh_dims, int to, bool& whole) {
  whole = true;
  if (mesh_dims == 0) {
    for (std::size_t r = 0; r < ranks_.count(); ++r) {
      if (held_for(from, r, to, r) != sizes(to)[r]) return false;
      whole &= sizes(from)[r] == sizes(to)[r];
    }
    return true;
  }
  const std::vector<Intervals>& have = merged(from, mesh_dims);
  const uint32_t alike = mesh_dims | ~ways_[index(from)].cutters;
  for (std::size_t r = 0; r < ranks_.count(); ++r) {
    const Intervals& found = have[ranks_.first_of_group(r, alike)];
    if (overlap(found, part(to, r)) != sizes(to)[r]) return false;
    whole &= count(found) == sizes(to)[r];
  }
  return true;
}

const std::vector<Intervals>& CutTable::merged(int way, uint32_t mesh_dims) {
  Way& it = ways_[index(way)];
  std::vector<Intervals>& out = it.merged[mesh_dims];
  if (!out.empty()) return out;
  const uint32_t alike = mesh_dims | ~it.cutters;
  std::vector<std::vector<Interval>> all(ranks_.count());
  for (std::size_t r = 0; r < ranks_.count(); ++r) {
    const std::size_t first = ranks_.first_of_group(r, alike);
    if (ranks_.first_of_group(r, ~it.cutters) != r) continue;  // another rank has the same part
    const Intervals mine = part(way, r);
    all[first].insert(all[first].end(), mine.begin(), mine.end());
  }
  for (auto& each : all) out.push_back(joined(std::move(each)));
  return out;
}

Intervals CutTable::part_of_group(int way, const std::vector<Cut>& cuts, std::size_t first, uint32_t mesh_dims) const {
  if (mesh_dims == 0) return part(way, first);
  std::vector<int64_t> at = ranks_.coordinates[first];
  std::vector<Interval> out;
  for (int64_t member = 0; member < ranks_.ranks_of(mesh_dims); ++member) {
    int64_t rest = member;
    for (std::size_t i = 0; mesh_dims >> i != 0; ++i) {
      if ((mesh_dims & bit(i)) == 0) continue;
      at[i] = rest % ranks_.mesh_shape[i];
      rest /= ranks_.mesh_shape[i];
    }
    const Intervals part = part_of(size_, cuts, ranks_.mesh_shape, at);
    out.insert(out.end(), part.begin(), part.end());
  }
  return joined(std::move(out));
}

Intervals CutTable::part(int way, std::size_t rank) const {
  const Way& it = ways_[index(way)];
  if (!it.single) return it.intervals[rank];
  const std::size_t place = index(way) * ranks_.count() + rank;
  return one_interval(begins_[place], begins_[place] + sizes_[place]);
}

void CutTable::multiply_already_held(int from, int to, int64_t* numbers) const {
  const std::size_t count = ranks_.count();
  const int64_t* const size_a = sizes(from);
  if (from == to) {
    for (std::size_t r = 0; r < count; ++r) numbers[r] *= size_a[r];
  } else if (ways_[index(from)].single && ways_[index(to)].single) {
    multiply_overlaps(&begins_[index(from) * count], size_a, &begins_[index(to) * count], sizes(to), count, numbers);
  } else {
    for (std::size_t r = 0; r < count; ++r) numbers[r] *= held_for(from, r, to, r);
  }
}

void CutTable::multiply_held_by_groups(int from, int to, uint32_t mesh_dims, std::vector<int64_t>& numbers) {
  const Groups& have = groups(from, mesh_dims);
  const Groups& need = groups(to, mesh_dims);
  if (&have == &need) {
    for (std::size_t g = 0; g < numbers.size(); ++g) numbers[g] *= need.sizes[g];
  } else if (have.intervals.empty() && need.intervals.empty()) {
    multiply_overlaps(have.begins.data(), have.sizes.data(), need.begins.data(), need.sizes.data(), numbers.size(),
                      numbers.data());
  } else {
    for (std::size_t g = 0; g < numbers.size(); ++g) numbers[g] *= overlap(have.of(g), need.of(g));
  }
}

// Ranks along the mesh dimension that makes the last cut, by chunks, have together what a rank has without that cut.
const CutTable::Groups& CutTable::groups(int way, uint32_t mesh_dims) {
  const Way& it = ways_[index(way)];
  if (it.length > 0) {
    const std::size_t last = it.length - 1U;
    const bool chunked = choices_[it.dims[last]][it.choices[last]].is_chunks();
    if (chunked && (mesh_dims & bit(it.dims[last])) != 0) return groups(it.shorter, mesh_dims);
  }
  const auto [place, fresh] = ways_[index(way)].groups.try_emplace(mesh_dims);
  if (fresh) place->second = find_groups(way, mesh_dims);
  return place->second;
}

CutTable::Groups CutTable::find_groups(int way, uint32_t mesh_dims) const {
  const Way& it = ways_[index(way)];
  const Placements placements = placements_of(it);
  const std::vector<Cut> cuts = cuts_of(tensor_dim_, placements, ranks_.mesh_shape);
  const std::vector<std::size_t> firsts = ranks_.first_ranks(mesh_dims);
  std::vector<Intervals> parts;
  for (const std::size_t r : firsts) {
    // A group has the same as an earlier one if they differ along mesh dimensions that do not cut.
    const std::size_t like = ranks_.first_of_group(r, mesh_dims | ~it.cutters);
    const auto earlier = static_cast<std::size_t>(std::ranges::lower_bound(firsts, like) - firsts.begin());
    parts.push_back(like < r ? parts[earlier] : part_of_group(way, cuts, r, mesh_dims & it.cutters));
  }
  Groups out;
  for (const Intervals& part : parts) {
    out.begins.push_back(part.empty() ? 0 : part.front().begin);
    out.sizes.push_back(count(part));
  }
  if (std::ranges::any_of(parts, [](const Intervals& part) { return part.size() > 1; }))
    out.intervals = std::move(parts);
  return out;
}

}  // namespace tessera

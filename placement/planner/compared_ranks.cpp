#include "tessera/placement/planner/compared_ranks.h"

#include <algorithm>
#include <exception>
#include <numeric>

namespace tessera {
namespace {

uint32_t bit(std::size_t mesh_dim) { return uint32_t{1} << mesh_dim; }

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

}  // namespace

ComparedRanks::ComparedRanks(std::span<const int64_t> shape, const std::vector<std::set<int64_t>>& some)
    : mesh_shape(shape.begin(), shape.end()), coordinates{{}} {
  for (const int64_t n : mesh_shape) ranks *= n;
  sizes_of_groups.push_back(1);
  for (const int64_t n : mesh_shape) {
    for (std::size_t others = 0, count = sizes_of_groups.size(); others < count; ++others)
      sizes_of_groups.push_back(sizes_of_groups[others] * n);
  }
  all = some.empty();
  for (std::size_t i = 0; i < mesh_shape.size(); ++i) {
    std::vector<int64_t> here(static_cast<std::size_t>(mesh_shape[i]));
    std::iota(here.begin(), here.end(), 0);
    if (!all) here.assign(some[i].begin(), some[i].end());
    counts.push_back(here.size());
    std::vector<std::vector<int64_t>> longer;
    for (const auto& start : coordinates) {
      for (const int64_t c : here) {
        longer.push_back(start);
        longer.back().push_back(c);
      }
    }
    coordinates = std::move(longer);
  }
}

std::size_t ComparedRanks::first_of_group(std::size_t rank, uint32_t mesh_dims) const {
  std::size_t out = 0;
  if (!all) {
    std::size_t step = 1;
    for (std::size_t i = counts.size(); i-- > 0; step *= counts[i]) {
      if ((mesh_dims & bit(i)) == 0) out += rank / step % counts[i] * step;
    }
    return out;
  }
  for (std::size_t i = 0; i < mesh_shape.size(); ++i) {
    const int64_t at = (mesh_dims & bit(i)) != 0 ? 0 : coordinates[rank][i];
    out = out * static_cast<std::size_t>(mesh_shape[i]) + static_cast<std::size_t>(at);
  }
  return out;
}

std::vector<std::size_t> ComparedRanks::first_ranks(uint32_t mesh_dims) const {
  std::vector<std::size_t> out;
  for (std::size_t r = 0; r < count(); ++r) {
    if (first_of_group(r, mesh_dims) == r) out.push_back(r);
  }
  return out;
}

std::size_t ComparedRanks::num_groups(uint32_t mesh_dims) const {
  std::size_t out = 1;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if ((mesh_dims & bit(i)) == 0) out *= counts[i];
  }
  return out;
}

ComparedRanks compared_ranks(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                             const std::vector<Placements>& choices, bool sample) {
  const int64_t ranks = std::accumulate(mesh_shape.begin(), mesh_shape.end(), int64_t{1}, std::multiplies<>());
  if (!sample || ranks <= kCompareAll) return ComparedRanks(mesh_shape);
  std::vector<std::set<int64_t>> some;
  for (std::size_t i = 0; i < mesh_shape.size(); ++i) {
    std::set<int64_t>& here = some.emplace_back(std::set<int64_t>{0, mesh_shape[i] - 1});
    if (mesh_shape[i] > 1) here.insert(1);
    for (const Placement& p : choices[i]) {
      if (p.is_shard())
        add_extremes(p.partition(), shape[static_cast<std::size_t>(p.tensor_dim())], mesh_shape[i], here);
    }
  }
  return ComparedRanks(mesh_shape, some);
}

}  // namespace tessera

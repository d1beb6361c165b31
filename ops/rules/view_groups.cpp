#include "tessera/ops/rules/view_groups.h"

#include <algorithm>

#include "tessera/placement/layout.h"

namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

std::vector<ViewGroup> common_front(const Sizes& from, const Sizes& to) {
  std::vector<ViewGroup> out;
  for (std::size_t d = 0; d < std::min(from.size(), to.size()) && from[d] == to[d]; ++d) {
    out.push_back({d, d, from[d], to[d], 1, 1});
  }
  return out;
}

// Reads one group of dimensions, starting at `i` of `from` and `j` of `to`, and moves both past it.
ViewGroup take_group(const Sizes& from, const Sizes& to, std::size_t& i, std::size_t& j) {
  ViewGroup group{i, j, from[i], to[j], 1, 1};
  int64_t left = from[i];
  int64_t right = to[j];
  while (left != right) {
    if (left < right) {
      left *= from[++i];
    } else {
      right *= to[++j];
    }
  }
  group.input_inner = left / group.input_size;
  group.output_inner = right / group.output_size;
  ++i;
  ++j;
  return group;
}

// Returns the elements in `part`, with `inner` elements per index.
Intervals elements_of(Intervals part, int64_t inner) {
  for (Interval& interval : part) {
    interval.begin *= inner;
    interval.end *= inner;
  }
  return part;
}

}  // namespace

bool has_zero(const Sizes& sizes) { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }

std::vector<ViewGroup> view_groups(const Sizes& from, const Sizes& to) {
  if (has_zero(from) || has_zero(to)) return common_front(from, to);
  std::vector<ViewGroup> out;
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < from.size() && j < to.size()) {
    if (from[i] == 1 && to[j] != 1) {
      ++i;
    } else if (to[j] == 1 && from[i] != 1) {
      ++j;
    } else {
      out.push_back(take_group(from, to, i, j));
    }
  }
  return out;
}

bool same_elements(const ViewGroup& group, const Placements& placements, std::span<const int64_t> mesh_shape) {
  if (group.input_inner == group.output_inner) return true;
  // A partition of a fixed size fits only one of the two sizes.
  const auto fixed = [&](const Placement& p) {
    return p.is_shard(static_cast<int64_t>(group.input_dim)) && p.partition().size();
  };
  if (std::ranges::any_of(placements, fixed)) return false;
  const std::span<const int64_t> decided = mesh_shape.first(placements.size());
  const auto cuts = cuts_of(static_cast<int64_t>(group.input_dim), placements, decided);
  std::vector<int64_t> coordinate(placements.size(), 0);
  const auto visit = [&](const auto& self, std::size_t mesh_dim) -> bool {
    if (mesh_dim == placements.size()) {
      return elements_of(part_of(group.input_size, cuts, decided, coordinate), group.input_inner) ==
             elements_of(part_of(group.output_size, cuts, decided, coordinate), group.output_inner);
    }
    const bool cut = placements[mesh_dim].is_shard(static_cast<int64_t>(group.input_dim));
    for (coordinate[mesh_dim] = 0; coordinate[mesh_dim] < (cut ? decided[mesh_dim] : 1); ++coordinate[mesh_dim]) {
      if (!self(self, mesh_dim + 1)) return false;
    }
    coordinate[mesh_dim] = 0;
    return true;
  };
  return visit(visit, 0);
}

}  // namespace tessera::rules

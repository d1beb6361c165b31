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

bool has_zero(const Sizes& sizes) { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }

// Takes the dimensions of one group, from `i` of `from` and `j` of `to` on.
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

// The pieces of a dimension that chunks nested in this order leave.
std::vector<Range> nested_chunks(int64_t size, const std::vector<int64_t>& parts) {
  std::vector<Range> pieces = {{.offset = 0, .size = size}};
  for (const int64_t n : parts) {
    std::vector<Range> finer;
    for (const Range& piece : pieces) {
      for (int64_t k = 0; k < n; ++k) {
        const Range chunk = chunk_range(piece.size, n, k);
        finer.push_back({.offset = piece.offset + chunk.offset, .size = chunk.size});
      }
    }
    pieces = std::move(finer);
  }
  return pieces;
}

}  // namespace

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
  std::vector<int64_t> parts;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (placements[i].is_shard(static_cast<int64_t>(group.input_dim))) parts.push_back(mesh_shape[i]);
  }
  const auto before = nested_chunks(group.input_size, parts);
  const auto after = nested_chunks(group.output_size, parts);
  for (std::size_t k = 0; k < before.size(); ++k) {
    if (before[k].size * group.input_inner != after[k].size * group.output_inner) return false;
    if (before[k].size > 0 && before[k].offset * group.input_inner != after[k].offset * group.output_inner) return false;
  }
  return true;
}

}  // namespace tessera::rules

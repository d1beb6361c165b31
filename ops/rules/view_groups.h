#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera::rules {

// Groups dimensions of a tensor with the dimensions of a view of it that hold the same elements. The leftmost dimension
// of each side stands for the group: cutting one is the same as cutting the other if the chunks hold the same elements.
struct ViewGroup {
  std::size_t input_dim;
  std::size_t output_dim;
  int64_t input_size;
  int64_t output_size;
  int64_t input_inner;  // elements per index of the leftmost dimension
  int64_t output_inner;
};

// Says whether a tensor of these sizes has no elements.
bool has_zero(const std::vector<int64_t>& sizes);

// Returns the groups of a view of sizes `from` as `to`. A dimension of size 1 is in a group only if both sides have it.
//   (2, 12, 5) -> (2, 3, 20): dimensions 0 and 0; then 1 and 1, with 5 elements per index before and 20 after
// For a tensor without elements, the groups are the leading dimensions that stay the same.
std::vector<ViewGroup> view_groups(const std::vector<int64_t>& from, const std::vector<int64_t>& to);

// Returns whether `placements` of the input, applied to the group's dimension of the view, leave every rank the same
// elements. They may be those of the first mesh dimensions only.
//   12 over 4 ranks as (3, 4): 3 elements each, but the view has 4, 4, 4, 0: no. Over 3 ranks: yes
bool same_elements(const ViewGroup& group, const Placements& placements, std::span<const int64_t> mesh_shape);

}  // namespace tessera::rules

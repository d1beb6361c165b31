#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera::rules {

// Dimensions of a tensor and of a view of it that hold the same elements, by the leftmost of each: a split of the one
// is a split of the other when its chunks hold the same elements.
struct ViewGroup {
  std::size_t input_dim;
  std::size_t output_dim;
  int64_t input_size;
  int64_t output_size;
  int64_t input_inner;  // elements in one step of the leftmost dimension
  int64_t output_inner;
};

// The groups of a view of sizes `from` as `to`; dimensions of size 1 are in one only where both have them.
//   (2, 12, 5) -> (2, 3, 20): dimensions 0 and 0; then 1 and 1, where a step of 1 is 5 elements before and 20 after
// A tensor without elements: the dimensions at the front that stay.
std::vector<ViewGroup> view_groups(const std::vector<int64_t>& from, const std::vector<int64_t>& to);

// Whether `placements` of the input, given to the view for the group's dimensions, leave every rank the same elements.
// They may be those of the first mesh dimensions only.
//   12 over 4 ranks as (3, 4): 3 elements each against 4, 4, 4, 0: no; over 3 ranks: yes
bool same_elements(const ViewGroup& group, const Placements& placements, std::span<const int64_t> mesh_shape);

}  // namespace tessera::rules

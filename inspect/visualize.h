#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/plan.h"

namespace tessera {

// These functions draw layouts and plans, as text for a terminal and as SVG. None communicates, and each
// gives the same picture on every rank.
//
// A picture has a cell for each box of the tensor that ranks hold whole, with the ranks in it: "0, 1" where each of
// both holds the values, "sum(0, 1)" where each holds a term of a pending sum. Rows and columns are the last two tensor
// dimensions that are cut, and elements are counted from 0, so 0-4 are four elements. There is a slice for each cell of
// the other tensor dimensions that are cut. Ranks without an element are listed below. Where there are more than 24
// rows, 16 columns or 16 slices, the elements of each rank are listed instead: of 64 ranks at most, in an SVG of 16.

// Return the picture of a DTensor's layout. Throw std::invalid_argument on a plain tensor.
std::string visualize(const at::Tensor& dtensor);
std::string visualize_svg(const at::Tensor& dtensor);

// Return the picture of a layout that no tensor needs to have; `shape` is global. Throw std::invalid_argument on a
// negative size, and on placements that do not fit the mesh or the shape.
std::string visualize(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& placements);
std::string visualize_svg(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& placements);

// Return the pictures of the layouts before a plan, between its steps and after it, with each step's collective, the
// most bytes that a rank receives, and the estimated time. For a DTensor's redistribution:
//   std::cout << tessera::visualize(tessera::explain(x, placements).plan);
std::string visualize(const Plan& plan);
std::string visualize_svg(const Plan& plan);

}  // namespace tessera

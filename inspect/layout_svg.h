#pragma once

#include <string>
#include <vector>

#include "tessera/inspect/layout_grid.h"

namespace tessera {

// Returns one SVG of several layouts, one below the other; steps[i], if there is one, is written between grids[i] and
// grids[i + 1]. Rows and columns are as wide as their parts of the tensor, unless their texts need more. A rank has one
// colour; a cell that several ranks hold has stripes of theirs, and one that is pending a dashed edge.
std::string layout_svg(const std::vector<LayoutGrid>& grids, const std::vector<std::string>& steps);

}  // namespace tessera

#pragma once

#include <string_view>
#include <vector>

#include "tessera/ops/rules/rule.h"
#include "tessera/ops/rules/view_tiles.h"

namespace tessera::rules {

// OpRule::keep of an operator whose results are views of input 0, one view a result: each rank views its piece, by `kernel` where the
// operator itself would not.
void keep_cuts(OpRule& rule, const OpCall& call, std::vector<TileView> views, std::string_view kernel);

// OpRule::keep of the gradient of such a view, taken of a tensor of `sizes` along `dim`: the layouts of that tensor in which the
// gradient, input 0, is where its elements are, those with Shard(dim) in the place of some of the gradient's cuts.
void keep_gradient(OpRule& rule, const OpCall& call, const std::vector<int64_t>& sizes, int64_t dim, TileView view);

}  // namespace tessera::rules

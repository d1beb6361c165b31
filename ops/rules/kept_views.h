#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/ops/rules/rule.h"
#include "tessera/ops/rules/view_tiles.h"

namespace tessera::rules {

// OpRule::keep of an operator whose results are views of input 0, one view a result: each rank views its piece, by
// `kernel` where the operator itself would not.
void keep_cuts(OpRule& rule, const OpCall& call, std::vector<TileView> views, std::string_view kernel);

// OpRule::keep of the gradient of such a view, taken of a tensor of `sizes` along `dim`: the layouts of that tensor in
// which the gradient, input 0, is where its elements are: those with Shard(dim) in the place of some of the gradient's
// cuts; of a slice in steps of 1 from `start` on, that which is cut as the gradient is, over and over.
//   k of [q; k; v], 8 features each, with a gradient S(0) over 2 ranks -> BC(0, 4)
void keep_gradient(OpRule& rule, const OpCall& call, const std::vector<int64_t>& sizes, int64_t dim, TileView view,
                   std::optional<int64_t> start = {});

// OpRule::keep of an operator that puts all its inputs one after another along `dim`: each rank puts its pieces
// together.
//   q, k, v of 8 features each as S(-1) over 2 ranks -> BC(-1, 4)
void keep_joined(OpRule& rule, const OpCall& call, int64_t dim);

}  // namespace tessera::rules

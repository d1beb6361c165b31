#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/ops/rules/rule.h"
#include "tessera/ops/rules/view_tiles.h"

namespace tessera::rules {

// Sets OpRule::outputs_for for an operator whose results are views of input 0, with one TileView per result. Each rank
// then views its own piece, by the local kernel `kernel` where the operator itself would not do so.
void keep_cuts(OpRule& rule, const OpCall& call, std::vector<TileView> views, std::string_view kernel);

// Sets OpRule::outputs_for for the gradient of such a view. The viewed tensor has `sizes` and is viewed along `dim`.
// Input 0 is the view's gradient; the result is laid out so that the gradient's elements are already on the right
// ranks. Layouts with Shard(dim) in the place of some of the gradient's Shards are tried, and, for a slice with step 1
// from `start`, the layout that repeats the gradient's cuts over the whole dimension.
//   k of [q; k; v], 8 features each, with a gradient S(0) over 2 ranks -> BC(0, 4)
void keep_gradient(OpRule& rule, const OpCall& call, const std::vector<int64_t>& sizes, int64_t dim, TileView view,
                   std::optional<int64_t> start = {});

// Does the same for the gradient of the diagonal of two dimensions at `offset`, or for a tensor that has input 0 as
// that diagonal and zeros elsewhere. Layouts with Shard(dim1) or Shard(dim2), or with input 0's own partition, in the
// place of the Shards of the diagonal are tried.
void keep_diagonal_gradient(OpRule& rule, const OpCall& call, const std::vector<int64_t>& sizes, int64_t dim1,
                            int64_t dim2, int64_t offset);

// Sets OpRule::outputs_for for an operator that concatenates all its inputs along `dim`: each rank concatenates its
// pieces. What is pending is reduced first where the inputs' dtypes differ.
//   q, k, v of 8 features each as S(-1) over 2 ranks -> BC(-1, 4)
void keep_joined(OpRule& rule, const OpCall& call, int64_t dim);

}  // namespace tessera::rules

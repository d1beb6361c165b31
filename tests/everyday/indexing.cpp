#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>

#include "tessera/tests/everyday/row.h"

// clang-format off
namespace tessera::testing {

std::vector<Row> indexing_rows() {
  return {
      EVERYDAY("a/- -/- -/- a/- a/-", x.index({rows})),
      EVERYDAY("-/- a/- -/- -/- a/-", x.index({at::indexing::Slice(), rows.clamp_max(4)})),
      EVERYDAY("gg/g gg/g r/- gg/g gg/g", x.index({mask})),
      EVERYDAY("-/- -/- -/- -/- -/-", x.index({rows, rows.clamp_max(4)})),
      EVERYDAY("a/- -/- -/- a/- a/-", at::index_select(x, 0, rows)),
      EVERYDAY("-/- a/- -/- -/- a/-", at::index_select(x, 1, rows.clamp_max(4))),
      EVERYDAY("-/- a/- -/- -/- a/-", at::gather(x, 1, columns)),
      EVERYDAY("a/- -/- -/- a/- a/-", at::gather(x, 0, columns)),
      EVERYDAY("-/- -/- s/- -/- -/-", at::scatter(x, 1, columns, 2.5)),
      EVERYDAY("-/- g/- -/- -/- g/-", at::scatter_add(x, 1, columns, y)),
      EVERYDAY("g/- -/- -/- g/- g/-", at::scatter_add(x, 0, columns, y)),
      EVERYDAY("-/- g/aaaaaaa ss/gg -/- g/aaaaaaa", at::scatter_reduce(x, 1, columns, y, "amax")),
      EVERYDAY("g/- -/- -/- g/- g/-", at::index_add(x, 0, rows, y)),
      EVERYDAY("-/- g/- -/- -/- g/-", at::index_add(x, 1, rows.slice(0, 0, 5).clamp_max(4), y)),
      EVERYDAY("g/- -/- ss/- g/- g/-", at::index_copy(x, 0, 5 - at::arange(6, at::kLong), y)),
      EVERYDAY("-/- -/- s/- -/- -/-", at::index_fill(x, 0, rows, 2.5)),
      EVERYDAY("g/- -/- -/- g/- g/-", at::index_put(x, {rows}, y, true)),
      EVERYDAY("-/- -/- s/- -/- -/-", at::index_put(x, {mask}, at::scalar_tensor(1.5, at::kDouble))),
      EVERYDAY("gg/gg gg/gg r/- gg/gg gg/gg", at::masked_select(x, mask)),
      EVERYDAY("ggg/g ggg/g rr/- ggg/g ggg/g", at::masked_scatter(x, mask, y)),
      EVERYDAY("g/g g/g -/- g/g g/g", at::take(x, columns)),
      EVERYDAY("-/- a/- -/- -/- a/-", at::take_along_dim(x, columns, 1)),
      EVERYDAY("g g - g g", at::nonzero(mask)),
      EVERYDAY("g g - g g", at::argwhere(mask)),
      EVERYDAY("- - s - -", at::bucketize(x, at::arange(-2, 3, at::kDouble))),
      EVERYDAY("- - s - -", at::searchsorted(at::arange(-2, 3, at::kDouble), x)),
      EVERYDAY("- - - - -", at::isin(classes, rows)),
      EVERYDAY("- - - - -", at::one_hot(classes, 5)),
      EVERYDAY("-/- -/- -/- -/- -/-", at::embedding(weight, classes.clamp_max(4))),
      EVERYDAY("-/- -/- -/- -/- -/-", at::embedding(x, rows)),
  };
}

}  // namespace tessera::testing

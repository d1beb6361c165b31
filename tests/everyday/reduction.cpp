#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>

#include "tessera/tests/everyday/row.h"

// clang-format off
namespace tessera::testing {

std::vector<Row> reduction_rows() {
  return {
      EVERYDAY("-/- -/- -/- -/- -/-", x.sum()),
      EVERYDAY("-/- -/- -/- -/- -/-", x.sum(0)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.sum(1)),
      EVERYDAY("-/- -/- -/- -/- -/-", at::sum(x, at::IntArrayRef({0, 1}), true)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.mean()),
      EVERYDAY("-/- -/- -/- -/- -/-", x.mean(0)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.mean(1, true)),
      EVERYDAY("-/gr -/gr s/sgrsg -/gr -/gr", x.prod()),
      EVERYDAY("-/rr -/r s/srssg -/rr -/rr", x.prod(0)),
      EVERYDAY("-/rrrg -/rrrg s/rrrg -/rrrg -/rrrg", x.max()),
      EVERYDAY("-/rrrg -/rrrg s/rrrg -/rrrg -/rrrg", x.min()),
      EVERYDAY("a/g -/- s/g a/g a/a", std::get<0>(x.max(0))),
      EVERYDAY("-/- a/g s/g -/- a/g", std::get<0>(x.min(1))),
      EVERYDAY("-/rrg -/- s/g -/rrg -/rsg", at::amax(x, {0})),
      EVERYDAY("-/- -/rsaa s/g -/- -/rsaa", at::amin(x, {1}, true)),
      EVERYDAY("- - s - -", at::aminmax(x.detach(), 0)),
      EVERYDAY("rr rr r rr rr", x.argmax()),
      EVERYDAY("a - s a a", x.argmax(0)),
      EVERYDAY("- a s - a", x.argmin(1)),
      EVERYDAY("g/r g/r r/r g/r g/r", x.var()),
      EVERYDAY("a/r -/- s/r a/r a/r", x.var(0)),
      EVERYDAY("-/- a/rg s/gr -/- a/rg", x.std(1)),
      EVERYDAY("a/r -/- s/r a/r a/r", at::var_mean(x, 0)),
      EVERYDAY("r/- r/- sr/r r/- r/-", x.norm()),
      EVERYDAY("s/gg -/- ss/sg s/gg sp/aa", x.norm(2, 0)),
      EVERYDAY("-/- -/- s/sg -/- -/-", at::linalg_vector_norm(x, 1)),
      EVERYDAY("-/- s/g s/ssg -/- s/g", at::linalg_vector_norm(x, 3, 1)),
      EVERYDAY("-/- a/g s/sg -/- a/g", at::logsumexp(x, 1)),
      EVERYDAY("a/g -/- s/sg a/g a/a", at::logsumexp(x, 0)),
      EVERYDAY("a/- -/- -/- a/- a/-", at::cumsum(x, 0)),
      EVERYDAY("-/- a/- -/- -/- a/-", at::cumsum(x, 1)),
      EVERYDAY("-/r a/raa s/srsg -/r a/raa", at::cumprod(x, 1)),
      EVERYDAY("a/a -/- s/g a/a a/a", std::get<0>(at::cummax(x, 0))),
      EVERYDAY("-/- a/aaa s/ssg -/- a/aaa", at::logcumsumexp(x, 1)),
      EVERYDAY("a/a -/- s/g a/a a/a", std::get<0>(x.sort(0))),
      EVERYDAY("-/- a/a s/g -/- a/a", std::get<0>(x.sort(1, true))),
      EVERYDAY("- a s - a", x.argsort(true, 1)),
      EVERYDAY("-/- a/a s/g -/- a/g", std::get<0>(x.topk(2, 1))),
      EVERYDAY("a/a -/- s/g a/a a/a", std::get<0>(x.topk(2, 0))),
      EVERYDAY("-/- a/g s/g -/- a/g", std::get<0>(x.kthvalue(2, 1))),
      EVERYDAY("-/- a/g s/g -/- a/g", std::get<0>(x.median(1))),
      EVERYDAY("g g r g g", at::median(x.detach())),
      EVERYDAY("-/- -/- s/sg -/- -/-", at::nansum(x, 0)),
      EVERYDAY("- - s - -", at::count_nonzero(x)),
      EVERYDAY("- - - - -", at::any(mask)),
      EVERYDAY("- - - - -", at::all(mask, 0)),
      EVERYDAY("-/- -/- s/sg -/- -/-", at::norm(x, 1)),
      EVERYDAY("-/- -/- -/- -/- -/-", at::trace(x)),
      EVERYDAY("- - - - -", at::bincount(classes)),
      EVERYDAY("- - s - -", at::histc(x, 4, -2, 2)),
      EVERYDAY("a/- -/- -/- a/- a/-", at::diff(x, 1, 0)),
      EVERYDAY("-/- a/a s/g -/- a/a", at::quantile(x, 0.3, 1)),
      EVERYDAY("r r rr r rr", x.equal(y)),
      EVERYDAY("r r ssssr r r", at::allclose(x, y)),
      EVERYDAY("r r r r r", x.sum().item<double>()),
      EVERYDAY("r r r r r", at::is_nonzero(x.sum())),
      EVERYDAY("- - - - -", at::unique_consecutive(classes)),
      EVERYDAY("- - - - -", at::_unique2(classes)),
  };
}

}  // namespace tessera::testing

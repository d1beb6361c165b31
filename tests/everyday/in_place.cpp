#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>

#include "tessera/tests/everyday/row.h"

// clang-format off
namespace tessera::testing {

namespace {

// Writes through a view.
at::Tensor with_zero_rows(const at::Tensor& x) {
  at::Tensor d = x.clone();
  d.slice(0, 0, 2).zero_();
  return d;
}

at::Tensor with_filled_column(const at::Tensor& x) {
  at::Tensor d = x.clone();
  d.select(1, 3).fill_(2);
  return d;
}

at::Tensor with_added_view(const at::Tensor& x) {
  at::Tensor d = x.clone();
  d.view({6, 5, 1}).add_(1);
  return d;
}

}  // namespace

std::vector<Row> in_place_rows() {
  return {
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().add_(y)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().mul_(2)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().zero_()),
      EVERYDAY("-/- -/- s/- -/- -/-", x.clone().fill_(2)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().copy_(y)),
      EVERYDAY("-/- -/- s/ssg -/- -/-", x.clone().clamp_(-0.5, 0.5)),
      EVERYDAY("-/- -/- s/sg -/- -/-", x.clone().relu_()),
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().masked_fill_(mask, 0)),
      EVERYDAY("-/- -/- s/- -/- -/-", x.clone().sub_(1)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().div_(2)),
      EVERYDAY("-/- -/- r/r -/- -/-", x.clone().addcmul_(y, y, 0.5)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().lerp_(y, 0.5)),
      EVERYDAY("g/- -/- -/- g/- g/-", x.clone().index_add_(0, rows, y)),
      EVERYDAY("-/- -/- s/- -/- -/-", x.clone().scatter_(1, columns, 1.5)),
      EVERYDAY("-/- -/- -/- -/- -/-", with_zero_rows(x)),
      EVERYDAY("-/- -/- s/- -/- -/-", with_filled_column(x)),
      EVERYDAY("-/- -/- s/- -/- -/-", with_added_view(x)),
      EVERYDAY("-/- -/- -/- -/- -/-", x.clone().t().mul_(3)),
      EVERYDAY("-/- -/- rrrr/- -/- -/-", at::_foreach_add({x, y}, {y, x})),
      EVERYDAY("-/- -/- rr/- -/- -/-", at::_foreach_mul({x, y}, 2)),
      EVERYDAY("rr/- rr/- srsr/rr rr/- rr/-", at::_foreach_norm({x, y})),
  };
}

}  // namespace tessera::testing

#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>

#include "tessera/tests/everyday/row.h"

// clang-format off
namespace tessera::testing {

std::vector<Row> product_rows() {
  return {
      EVERYDAY("-/r -/g -/r -/r -/sg", at::mm(x, weight)),
      EVERYDAY("-/r -/g -/r -/r -/sg", at::matmul(x, weight)),
      EVERYDAY("g/ss -/- r/rr g/ss g/ss", at::mm(x, y.t())),
      EVERYDAY("-/- g/ss r/rr -/- g/ss", at::mm(x.t(), y)),
      EVERYDAY("-/r -/g -/r -/r -/rg", at::mv(x, vector)),
      EVERYDAY("-/r -/g -/r -/r -/sg", at::linear(x, weight.t())),
      EVERYDAY("-/r -/g -/r -/r -/sg", at::addmm(at::zeros({4}, at::kDouble), x, weight)),
      EVERYDAY("-/- -/- r/r -/- -/-", at::matmul(heads, heads.transpose(-1, -2))),
      EVERYDAY("-/- -/- r/r -/- -/-", at::bmm(heads.flatten(0, 1), heads.flatten(0, 1).transpose(1, 2))),
      EVERYDAY("-/- -/- r/r -/- -/-", at::baddbmm(at::zeros({8, 6, 6}, at::kDouble), heads.flatten(0, 1), heads.flatten(0, 1).transpose(1, 2))),
      EVERYDAY("-/r -/g -/r -/r -/sg", at::einsum("ij,jk->ik", {x, weight})),
      EVERYDAY("-/- -/- r/r -/- -/-", at::einsum("bhqd,bhkd->bhqk", {heads, heads})),
      EVERYDAY("-/- -/- r/rr -/- -/-", at::einsum("ij,ij->", {x, y})),
      EVERYDAY("-/- -/- r/rr -/- -/-", at::dot(x.flatten(), y.flatten())),
      EVERYDAY("-/- -/- -/- -/- -/-", at::outer(vector, vector)),
      EVERYDAY("-/r -/g -/r -/r -/sg", at::tensordot(x, weight, {1}, {0})),
      EVERYDAY("-/r -/r -/r -/r -/r", at::kron(x, weight)),
      EVERYDAY("g/gga ag/agagaaa sr/srrsgr g/gga ga/gaagasa", at::cdist(x, y)),
      EVERYDAY("r/- gg/s rr/r r/- grg/s", at::linalg_inv(at::mm(x.t(), x) + at::eye(5, at::kDouble))),
      EVERYDAY("r/- gg/s rr/r r/- grg/s", at::linalg_det(at::mm(x.t(), x) + at::eye(5, at::kDouble))),
      EVERYDAY("-/- aa/aaaa r/rr -/- pp/ppaa", at::cross(x.slice(1, 0, 3), y.slice(1, 0, 3), 1)),
      EVERYDAY("r/- r/- sr/r r/- r/-", at::linalg_norm(x)),
  };
}

}  // namespace tessera::testing

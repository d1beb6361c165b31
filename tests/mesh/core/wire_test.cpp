#include "tessera/mesh/core/wire.h"

#include <utility>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using tessera::as_sizes;
using tessera::row_major;
using tessera::sum_rows;

TEST_CASE("as_sizes: a tensor that nobody else holds is reshaped where it is, and no other") {
  at::Tensor alone = at::arange(6);
  const void* const impl = alone.unsafeGetTensorImpl();
  const at::Tensor reshaped = as_sizes(std::move(alone), {2, 3});
  CHECK(reshaped.unsafeGetTensorImpl() == impl);
  CHECK(at::equal(reshaped, at::arange(6).view({2, 3})));

  at::Tensor held = at::arange(6);
  at::Tensor given = held;
  const at::Tensor view = as_sizes(std::move(given), {3, 2});
  CHECK(held.sizes() == at::IntArrayRef({6}));
  CHECK(at::equal(view, at::arange(6).view({3, 2})));
  CHECK(view.const_data_ptr() == held.const_data_ptr());
}

TEST_CASE("as_sizes: the first elements of a longer tensor, from where it begins") {
  const at::Tensor longer = at::arange(10).narrow(0, 3, 7);
  CHECK(at::equal(as_sizes(longer, {2, 2}), at::arange(3, 7).view({2, 2})));
  at::Tensor given = at::arange(10).narrow(0, 3, 7);
  CHECK(at::equal(as_sizes(std::move(given), {2, 2}), at::arange(3, 7).view({2, 2})));
}

TEST_CASE("sum_rows: each column is added in the order of rows, and rounded once") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    // Large rows that cancel leave of the small one what was added after them.
    for (const int64_t count : {3, 4, 5, 8, 9}) {
      CAPTURE(count);
      at::Tensor rows = at::zeros({count, 83}, dtype);
      rows[0].fill_(1e8);
      rows[1].fill_(1);
      rows[count - 1].fill_(-1e8);
      at::Tensor out = at::empty({83}, dtype);
      sum_rows(rows, out);
      CHECK(at::equal(out, at::zeros({83}, dtype)));
      rows[1].copy_(rows[count - 1]);
      rows[count - 1].fill_(1);
      sum_rows(rows, out);
      CHECK(at::equal(out, at::ones({83}, dtype)));
    }
  }
}

TEST_CASE("row_major: values of views, conjugates and negatives, and the tensor itself where it is so") {
  const at::Tensor matrix = at::arange(6).view({2, 3});
  CHECK(row_major(matrix).is_same(matrix));
  CHECK(row_major(matrix.t()).is_contiguous());
  CHECK(at::equal(row_major(matrix.t()), matrix.t()));
  const at::Tensor complex = at::complex(at::arange(3.0), at::ones(3, at::kFloat));
  const at::Tensor conjugate = row_major(complex.conj());
  CHECK(!conjugate.is_conj());
  CHECK(at::equal(at::imag(conjugate), -at::ones(3, at::kFloat)));
  const at::Tensor negative = row_major(at::imag(complex.conj()));
  CHECK(!negative.is_neg());
  CHECK(at::equal(negative, -at::ones(3, at::kFloat)));
  const at::Tensor zeros = at::_efficientzerotensor({2, 3}, at::kDouble);
  CHECK(row_major(zeros).const_data_ptr() != nullptr);
  CHECK(at::equal(row_major(zeros), at::zeros({2, 3}, at::kDouble)));
}

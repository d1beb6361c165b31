// Tests tensors whose memory does not hold their values: zeros without memory (the ZeroTensor key), and tensors with
// the Conjugate or Negative key.

#include <vector>

#include <ATen/ATen.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor complex_sample(at::IntArrayRef sizes) { return at::complex(sample(sizes), sample(sizes, 1)); }

// Returns tensors of sizes [rows, 3], one of each kind.
std::vector<at::Tensor> outside_of_memory(int64_t rows) {
  const at::Tensor zeros = at::_efficientzerotensor({rows, 3}, at::kDouble);
  const at::Tensor conjugate = complex_sample({rows, 3}).conj();
  const at::Tensor negative = at::imag(complex_sample({rows, 3}).conj());
  return {zeros, conjugate, negative};
}

// Returns the tensor with its values in memory, and complex numbers as pairs of real ones.
at::Tensor as_real(const at::Tensor& t) {
  const at::Tensor values = in_memory(t);
  return values.is_complex() ? at::view_as_real(values) : values;
}

bool equal_values(const at::Tensor& a, const at::Tensor& b) { return at::equal(in_memory(a), in_memory(b)); }

}  // namespace

TESSERA_RANKS_TEST_CASE("the gradient of sgn is zeros, of whatever size", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : all_layouts(mesh.ndim(), {R, S0, S1, P})) {
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 3}, {2, 3}, {260, 130}}) {
        CAPTURE(to_string(layout));
        CAPTURE(sizes[0]);
        at::Tensor x = spread(sample(sizes), mesh, layout);
        x.requires_grad_(true);
        const auto check = [&](const at::Tensor& loss, const at::Tensor& want) {
          x.mutable_grad() = at::Tensor();
          loss.backward();
          REQUIRE(is_dtensor(x.grad()));
          CHECK(has_memory(to_local(x.grad())));
          CHECK(close(full_tensor(x.grad()), want));
          x.grad().add_(1);
          CHECK(close(full_tensor(x.grad()), want + 1));
        };
        check(at::sgn(x).sum(), at::zeros(sizes, at::kDouble));
        check(at::sgn(x.mul(2)).mul(x).sum(), at::sgn(sample(sizes)));
        check(at::sgn(at::matmul(x, x.t())).sum(), at::zeros(sizes, at::kDouble));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("collectives take tensors whose values are not in memory", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size(0);
  for (const at::Tensor& t : outside_of_memory(n)) {
    const at::Tensor plain = in_memory(t);
    CAPTURE(c10::toString(t.key_set()));
    CHECK(!is_in_memory(t));
    CHECK(close(all_reduce(t, mesh, 0, ReduceOp::kSum), plain * n));
    CHECK(equal_values(all_gather(t, mesh, 0).select(0, n - 1), plain));
    CHECK(close(reduce_scatter(t, mesh, 0, ReduceOp::kSum), plain.select(0, mesh.local_rank(0)) * n));
    CHECK(equal_values(broadcast(t, mesh, 0, n - 1), plain));
    CHECK(equal_values(scatter(t, plain[0], mesh, 0, 0), plain.select(0, mesh.local_rank(0))));
    const std::vector<int64_t> counts(static_cast<std::size_t>(n), 3);
    const at::Tensor flat = t.reshape({-1});
    CHECK(equal_values(all_to_all(flat, counts, counts, mesh, 0).narrow(0, 0, 3), plain.select(0, mesh.local_rank(0))));
  }
}

TESSERA_RANKS_TEST_CASE("pieces whose values are not in memory are taken, checked, redistributed and gathered",
                        {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    const std::vector<Placements> layouts = all_layouts(mesh.ndim(), {R, S0, S1});
    for (const at::Tensor& t : outside_of_memory(5)) {
      const at::Tensor plain = in_memory(t);
      CAPTURE(c10::toString(t.key_set()));
      const at::Tensor d = from_local(t, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), R), {.check = true});
      CHECK(has_memory(to_local(d)));
      for (const Placements& layout : layouts) {
        CAPTURE(to_string(layout));
        CHECK(equal_values(full_tensor(redistribute(d, layout)), plain));
        CHECK(equal_values(full_tensor(distribute_tensor(t, mesh, layout)), plain));
        CHECK(close(in_memory(full_tensor(at::mul(redistribute(d, layout), 2))), plain * 2));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("conjugates and negatives of DTensors go from any layout to any other", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    const at::Tensor whole = complex_sample({5, 3});
    for (const Placements& from : all_layouts(mesh.ndim(), {R, S0, S1, P})) {
      for (const Placements& to : all_layouts(mesh.ndim(), {R, S0, S1, P})) {
        CAPTURE(to_string(from));
        CAPTURE(to_string(to));
        const at::Tensor conjugate = spread(whole, mesh, from).conj();
        CHECK(close(as_real(full_tensor(redistribute(conjugate, to))), as_real(whole.conj())));
        const at::Tensor negative = at::imag(conjugate);
        CHECK(close(in_memory(full_tensor(redistribute(negative, to))), in_memory(at::imag(whole.conj()))));
      }
    }
  }
}

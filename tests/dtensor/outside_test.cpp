// Tests a mesh over a part of the world: ranks outside it hold nothing and skip the communication.

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("a rank outside the mesh runs the same program with global sizes and empty pieces", {4}) {
  const DeviceMesh mesh(world(), c10::kCPU, Mesh({3}, {"tp"}, {3, 0, 2}));
  const bool inside = mesh.is_member();
  CHECK(inside == (world()->rank() != 1));
  const at::Tensor x = sample({5, 6});
  const CommCounter counter(mesh);
  at::Tensor dx = distribute_tensor(x, mesh, {S0}, kNoSource);
  at::Tensor w = distribute_tensor(sample({7, 6}, 1), mesh, {S0});
  at::Tensor b = distribute_tensor(sample({7}, 2), mesh, {R});
  w.requires_grad_(true);
  b.requires_grad_(true);
  CHECK(dx.sizes() == at::IntArrayRef({5, 6}));
  if (!inside) CHECK(to_local(dx).numel() == 0);
  const at::Tensor y = at::gelu(at::linear(dx, w, b));
  const at::Tensor z = at::layer_norm(y.view({5, 7, 1}).flatten(1), {7});
  CHECK(z.sizes() == at::IntArrayRef({5, 7}));
  const at::Tensor loss = z.pow(2).mean() + at::cross_entropy_loss(y, tessera::zeros({5}, mesh, {S0}, at::kLong));
  CHECK(loss.dim() == 0);
  loss.backward();
  CHECK(w.grad().sizes() == w.sizes());
  CHECK(placements_of(w.grad()) == Placements{S0});
  w.detach().add_(w.grad(), -0.1);
  at::_foreach_mul_({w.detach(), b.detach()}, 0.5);
  const at::Tensor moved = redistribute(dx, {S1});
  CHECK(moved.sizes() == at::IntArrayRef({5, 6}));
  const at::Tensor whole = full_tensor(moved);
  CHECK(tessera::rand({6, 2}, mesh, {S0}).sizes() == at::IntArrayRef({6, 2}));
  // Views for which pieces move are written.
  at::Tensor want = x.clone();
  dx[2][3] = 5;
  dx.view({3, 10}).add_(1);
  want[2][3] = 5;
  want.add_(1);
  const at::Tensor written = full_tensor(dx);
  if (inside) {
    CHECK(same(whole, x));
    CHECK(same(written, want));
  } else {
    CHECK(whole.numel() == 0);
    CHECK(counter.total() == 0);
  }
}

TESSERA_RANKS_TEST_CASE("list operators outside the mesh: their results have the layouts of the mesh's ranks", {4}) {
  const DeviceMesh a(world(), c10::kCPU, Mesh({2}, {"tp"}, {0, 1})), b(world(), c10::kCPU, Mesh({2}, {"tp"}, {2, 3}));
  const at::Tensor x = sample({5, 6}), y = sample({4}, 1);
  const std::vector<at::Tensor> both = {distribute_tensor(x, a, {S0}, kNoSource),
                                        distribute_tensor(y, a, {Partial()}, kNoSource)};
  const std::vector<at::Tensor> doubled = at::_foreach_mul(both, 2);
  CHECK(placements_of(doubled[0]) == Placements{S0});
  CHECK(placements_of(doubled[1]) == Placements{R});
  const at::Tensor moved = full_tensor(redistribute_to(doubled[0], b, {S0}));
  if (b.is_member()) CHECK(same(moved, x * 2));
  // Every rank refuses what the operator refuses.
  const std::vector<at::Tensor> whole = {distribute_tensor(at::arange(4), a, {S0}, kNoSource)};
  CHECK_THROWS(at::_foreach_add_(whole, 0.5));
  const Strict strict;
  CHECK_THROWS(at::_foreach_mul(both, 2));
}

TESSERA_RANKS_TEST_CASE("a plain tensor's gradient on a rank outside the mesh is zeros of its sizes", {4}) {
  const DeviceMesh mesh(world(), c10::kCPU, Mesh({3}, {"tp"}, {3, 0, 2}));
  const bool inside = mesh.is_member();
  const auto filled = [&](at::IntArrayRef sizes, double value) {
    return at::full(sizes, inside ? value : 0.0, at::TensorOptions(at::kDouble));
  };
  const at::Tensor whole = leaf(sample({5, 6}));
  (distribute_tensor(whole + 1, mesh, {S0}) * 2).sum().backward();
  CHECK(same(whole.grad(), filled({5, 6}, 2)));
  const at::Tensor bias = leaf(sample({6}, 1));
  {
    const ImplicitReplication guard;
    (distribute_tensor(sample({5, 6}), mesh, {S0}) + (bias + 1)).sum().backward();
  }
  CHECK(same(bias.grad(), filled({6}, 5)));
  // Outside the mesh a rank may pass a piece of any sizes.
  const at::Tensor piece = leaf(sample({inside ? 2 : 3, 4}, 2));
  full_tensor(from_local(piece + 1, mesh, {S0}, {.shape = std::vector<int64_t>{6, 4}})).sum().backward();
  CHECK(same(piece.grad(), filled(piece.sizes(), 1)));
  const at::Tensor largest = leaf(sample({4}, world()->rank()));
  full_tensor(from_local(largest, mesh, {Partial(ReduceOp::kMax)})).sum().backward();
  CHECK(largest.grad().sizes() == largest.sizes());
  if (!inside) CHECK(same(largest.grad(), filled({4}, 0)));
  FromLocalOptions options;
  options.mask = at::ones({4}, at::kBool);
  const at::Tensor masked = leaf(sample({4}, world()->rank()));
  full_tensor(from_local(masked, mesh, {MaskedPartial()}, options)).sum().backward();
  CHECK(same(masked.grad(), filled({4}, 1)));
}

TESSERA_RANKS_TEST_CASE("on a rank outside the mesh a hook that adds up a plain number leaves it as it is", {4}) {
  const DeviceMesh mesh(world(), c10::kCPU, Mesh({3}, {"tp"}, {3, 0, 2}));
  const bool inside = mesh.is_member();
  const at::Tensor w = leaf(distribute_tensor(sample({5, 3}), mesh, {S0}, kNoSource));
  at::Tensor total = at::zeros({}, at::kDouble), sums = at::zeros({3}, at::kDouble);
  w.register_hook([&](const at::Tensor& gradient) {
    total.add_(gradient.square().sum());
    sums.add_(gradient.sum(0));
  });
  (w * w).sum().backward();
  CHECK_FALSE(is_dtensor(total));
  CHECK(is_dtensor(sums));
  const at::Tensor gradient = sample({5, 3}).mul(2);
  CHECK(close(total, inside ? gradient.square().sum() : at::zeros({}, at::kDouble)));
  CHECK(sums.sizes() == at::IntArrayRef({3}));
  const at::Tensor whole = full_tensor(sums);
  if (inside) CHECK(close(whole, gradient.sum(0)));
}

TESSERA_RANKS_TEST_CASE("two halves of a world work side by side", {4}) {
  const std::vector<int64_t> low = {0, 1};
  const std::vector<int64_t> high = {3, 2};
  const DeviceMesh a(world(), c10::kCPU, Mesh({2}, {"tp"}, low));
  const DeviceMesh b(world(), c10::kCPU, Mesh({2}, {"tp"}, high));
  for (const DeviceMesh& mesh : {a, b}) {
    const at::Tensor x = distribute_tensor(sample({5, 3}), mesh, {S0});
    const at::Tensor total = full_tensor((x * 2).sum());
    if (mesh.is_member()) CHECK(close(total, (sample({5, 3}) * 2).sum()));
  }
}

// Tests redistribute_to: from one mesh to another of the same ranks, or of others.

#include <memory>
#include <stdexcept>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placements kKinds = {S0, S1, R, P, Partial(ReduceOp::kMax), BlockCyclic(0, 2)};

DeviceMesh mesh_of_ranks(std::vector<int64_t> shape, std::vector<int64_t> ranks) {
  return {world(), device().type(), Mesh(std::move(shape), {}, std::move(ranks))};
}

// Returns the pending tensor's terms on ranks of `from`, and an empty handle elsewhere.
at::Tensor made(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  if (mesh.is_member()) return spread(whole, mesh, placements);
  return from_local(at::empty({0}, whole.options()), mesh, placements, {.shape = whole.sizes().vec()});
}

void check_moves(const DeviceMesh& from, const DeviceMesh& to, at::IntArrayRef shape) {
  const at::Tensor whole = whole_numbers(shape);
  for (const Placements& before : all_layouts(from.ndim(), kKinds)) {
    for (const Placements& after : all_layouts(to.ndim(), kKinds)) {
      CAPTURE(from.to_string());
      CAPTURE(to.to_string());
      CAPTURE(to_string(before));
      CAPTURE(to_string(after));
      const at::Tensor moved = redistribute_to(made(whole, from, before), to, after);
      CHECK(mesh_of(moved) == to);
      CHECK(placements_of(moved) == after);
      CHECK(moved.sizes() == whole.sizes());
      if (to.is_member()) {
        CHECK(same(full_tensor(moved), whole));
      } else {
        CHECK(to_local(moved).numel() == 0);
      }
    }
  }
}

// Does not say how a value becomes pieces.
class LogSumExp final : public Reduction {
 public:
  LogSumExp() : Reduction("lse", ReduceOp::kSum) {}
  at::Tensor to_term(const at::Tensor& piece) const override { return piece.exp(); }
  at::Tensor from_terms(const at::Tensor& terms, int64_t) const override { return terms.log(); }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("the same ranks in another shape or order", {4}) {
  const std::vector<DeviceMesh> meshes = {mesh_of_ranks({4}, {0, 1, 2, 3}), mesh_of_ranks({4}, {2, 0, 3, 1}),
                                          mesh_of_ranks({2, 2}, {0, 1, 2, 3})};
  for (const DeviceMesh& from : meshes) {
    for (const DeviceMesh& to : meshes) {
      check_moves(from, to, {6, 5});
    }
  }
}

TESSERA_RANKS_TEST_CASE("to fewer ranks, to more, and to others", {3}) {
  const std::vector<DeviceMesh> meshes = {mesh_of_ranks({3}, {0, 1, 2}), mesh_of_ranks({2}, {1, 2}),
                                          mesh_of_ranks({1}, {0}), mesh_of_ranks({2}, {0, 1})};
  for (const DeviceMesh& from : meshes) {
    for (const DeviceMesh& to : meshes) {
      for (const auto& shape : std::vector<std::vector<int64_t>>{{6, 5}, {1, 2}, {0, 3}}) {
        check_moves(from, to, shape);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("a tensor without dimensions, such as a loss, is sent to ranks that had none of it", {3}) {
  const at::Tensor whole = at::full({}, 5.0, on(at::kDouble));
  const std::vector<DeviceMesh> meshes = {mesh_of_ranks({3}, {0, 1, 2}), mesh_of_ranks({2}, {1, 2}),
                                          mesh_of_ranks({1}, {0})};
  for (const DeviceMesh& from : meshes) {
    for (const DeviceMesh& to : meshes) {
      for (const Placement& after : {R, P}) {
        const at::Tensor moved = redistribute_to(made(whole, from, {R}), to, {after});
        CHECK(moved.dim() == 0);
        if (to.is_member()) CHECK(same(full_tensor(moved), whole));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE(
    "each rank receives only what it does not hold, by one all_to_all; none if every rank has all it needs", {4}) {
  const DeviceMesh line = mesh_of_ranks({4}, {0, 1, 2, 3});
  const DeviceMesh square = mesh_of_ranks({2, 2}, {0, 1, 2, 3});
  const at::Tensor source = spread(whole_numbers({8, 4}), line, {S0});
  const CommCounter counter(line);
  redistribute_to(source, square, {S0, S0});
  CHECK(counter.total() == 0);
  redistribute_to(source, square, {S0, R});
  CHECK(counter.count("all_to_all") == 1);
  CHECK(counter.total() == 1);
  const at::Tensor copied = spread(whole_numbers({8, 4}), square, {S0, R});
  redistribute_to(copied, mesh_of_ranks({2}, {0, 3}), {S0});
  CHECK(counter.total() == 1);
  redistribute_to(copied, mesh_of_ranks({2}, {3, 0}), {S0});
  CHECK(counter.total() == 2);
}

TESSERA_RANKS_TEST_CASE("a part that a rank keeps does not keep a copy of the whole in memory", {2}) {
  const at::Tensor whole = sample({5, 6}).t();
  const at::Tensor source = from_local(whole, mesh_of_ranks({2}, {0, 1}), {R},
                                       {.shape = std::vector<int64_t>{6, 5}, .stride = std::vector<int64_t>{1, 6}});
  const at::Tensor moved = redistribute_to(source, mesh_of_ranks({2}, {1, 0}), {S0});
  const at::Tensor piece = to_local(moved);
  CHECK(piece.storage().nbytes() == piece.nbytes());
  CHECK(same(full_tensor(moved), whole));
}

TESSERA_RANKS_TEST_CASE("gradients go back to the mesh that they came from", {3, 4}) {
  const int64_t n = world()->size();
  std::vector<int64_t> all;
  for (int64_t rank = 0; rank < n; ++rank) all.push_back(rank);
  const DeviceMesh line = mesh_of_ranks({n}, all);
  const DeviceMesh pair = mesh_of_ranks({2}, {n - 1, 0});
  // Parts are uneven on both meshes; of 5 columns the last of four ranks has none.
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    const at::Tensor whole = sample({7, 5}, 0, dtype), weight = sample({7, 5}, 2, dtype);
    for (const Placement& before : {S0, S1, P, R}) {
      for (const Placement& between : {S0, S1}) {
        CAPTURE(c10::toString(dtype));
        CAPTURE(to_string(before));
        CAPTURE(to_string(between));
        const at::Tensor source = leaf(whole, line, {before});
        const at::Tensor back = redistribute_to(redistribute_to(source, pair, {between}), line, {R});
        (full_tensor(back) * weight).sum().backward();
        CHECK(placements_of(source.grad()) == Placements{before == P ? R : before});
        CHECK(same(full_tensor(source.grad()), weight));
      }
    }
  }
  at::Tensor source = spread(sample({6, 5}), line, {S0}).requires_grad_(true);
  full_tensor(redistribute_to(redistribute_to(source, pair, {R}, Placements{S1}), line, {R})).sum().backward();
  CHECK(same(full_tensor(source.grad()), at::ones({6, 5}, on(at::kDouble))));
}

TESSERA_RANKS_TEST_CASE("a result without a gradient, and one with a plain gradient, go back", {2}) {
  const DeviceMesh line = mesh_of_ranks({2}, {0, 1});
  const DeviceMesh turned = mesh_of_ranks({2}, {1, 0});
  at::Tensor source = spread(sample({6, 5}), line, {S0}).requires_grad_(true);
  at::Tensor other = spread(sample({6, 5}, 1), turned, {S0}).requires_grad_(true);
  const std::vector<at::Tensor> moved = redistribute_many({redistribute_to(source, turned, {S1}), other}, {{R}, {R}});
  full_tensor(moved[1]).sum().backward();
  CHECK_FALSE(source.grad().defined());
  redistribute_to(source, turned, {S1}).backward(at::ones({6, 5}, on(at::kDouble)));
  CHECK(same(full_tensor(source.grad()), at::ones({6, 5}, on(at::kDouble))));
}

TESSERA_RANKS_TEST_CASE("arguments that do not fit are refused before any communication", {2}) {
  const DeviceMesh line = mesh_of_ranks({2}, {0, 1});
  const DeviceMesh other = mesh_of_ranks({2}, {1, 0});
  const at::Tensor source = spread(sample({6, 5}), line, {S0});
  const CommCounter counter(line);
  CHECK_THROWS_WITH_AS(redistribute_to(source, other, {R, R}), doctest::Contains("redistribute_to: 2 placements"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(redistribute_to(source, other, {Shard(2)}), doctest::Contains("redistribute_to"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(redistribute_to(source, other, {R}, Placements{Shard(7)}),
                       doctest::Contains("redistribute_to: grad_placements"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(redistribute_to(source, other, {R}, Placements{RaggedShard(0, {1, 2})}),
                       doctest::Contains("redistribute_to: grad_placements"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(redistribute_to(made(sample({6, 5}), mesh_of_ranks({1}, {0}), {R}), mesh_of_ranks({1}, {1}),
                                       {Partial(std::make_shared<const LogSumExp>())}),
                       doctest::Contains("implement Reduction::spread"), std::invalid_argument);
  const DeviceMesh stranger = init_device_mesh(device_name(), {1}, {"x"}, World::fake(0, 1));
  CHECK_THROWS_WITH_AS(redistribute_to(source, stranger, {R}), doctest::Contains("is of another World than"),
                       std::invalid_argument);
  CHECK(counter.total() == 0);
}

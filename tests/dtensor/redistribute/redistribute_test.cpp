#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placements kKinds = {S0,
                           S1,
                           R,
                           P,
                           Partial(ReduceOp::kAvg),
                           Partial(ReduceOp::kMax),
                           Partial(ReduceOp::kMin),
                           Partial(ReduceOp::kProduct)};

bool possible(const Placements& placements, at::ScalarType dtype) {
  try {
    check_partials(placements, dtype, "test");
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

void check_move(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& from, const Placements& to) {
  CAPTURE(mesh.to_string());
  CAPTURE(whole.sizes());
  CAPTURE(whole.scalar_type());
  CAPTURE(to_string(from));
  CAPTURE(to_string(to));
  const at::Tensor source = spread(whole, mesh, from);
  const at::Tensor before = to_local(source).clone();
  const at::Tensor moved = redistribute(source, to);
  CHECK(placements_of(moved) == to);
  CHECK(moved.sizes() == whole.sizes());
  CHECK(same(full_tensor(moved), whole));
  if (!any_partial(to)) CHECK(same(to_local(moved), piece_of(whole, mesh, to)));
  CHECK(same(to_local(source), before));
  if (from != to) CHECK_FALSE(to_local(moved).is_alias_of(to_local(source)));
}

void check_all(const DeviceMesh& mesh, at::IntArrayRef shape, at::ScalarType dtype, const Placements& kinds) {
  const at::Tensor whole = whole_numbers(shape, dtype);
  const auto layouts = all_layouts(mesh.ndim(), kinds);
  for (const Placements& from : layouts) {
    if (!possible(from, dtype)) continue;
    for (const Placements& to : layouts) {
      if (possible(to, dtype)) check_move(whole, mesh, from, to);
    }
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("redistribution never changes the value, whatever the pair, the shape and the dtype",
                        {1, 2, 3, 4}) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kByte,
                                     at::kBool, at::kComplexFloat}) {
    check_all(line(), {5, 3}, dtype, kKinds);
  }
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{13, 3}, {1, 3}, {0, 4}, {8, 8}, {3, 5, 2}, {2, 1, 3}, {4, 0}}) {
    check_all(line(), shape, at::kDouble, {S0, S1, R, P, Partial(ReduceOp::kMax)});
  }
  check_all(line(), {3, 4, 5}, at::kFloat, {Shard(2), S0, R, P});
}

TESSERA_RANKS_TEST_CASE("on two mesh dimensions too: small dtypes, and three tensor dimensions", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  check_all(mesh, {3, 5, 2}, at::kDouble, {S0, S1, R, P});
  for (const at::ScalarType dtype : {at::kBFloat16, at::kShort, at::kBool, at::kComplexFloat}) {
    check_all(mesh, {5, 2}, dtype, {S0, R, P, Partial(ReduceOp::kMax)});
  }
}

TESSERA_RANKS_TEST_CASE("the input may have any strides", {2}) {
  const at::Tensor whole = whole_numbers({6, 5}).t();
  for (const Placement& from : {S0, S1}) {
    const at::Tensor source =
        from_local(piece_of(whole, line(), {from}), line(), {from}, {.shape = whole.sizes().vec()});
    for (const Placement& to : {S0, S1, R}) CHECK(same(full_tensor(redistribute(source, {to})), whole));
  }
}

TESSERA_RANKS_TEST_CASE("to Partial: the value at coordinate 0, the neutral element elsewhere", {3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = whole_numbers({2, 2}, at::kLong);
  const auto local = [&](ReduceOp op, at::ScalarType dtype) {
    return to_local(redistribute(spread(whole.to(dtype), mesh, {R}), {Partial(op)}));
  };
  const bool first = mesh.local_rank(0) == 0;
  const auto expect = [&](const at::Tensor& got, double neutral) {
    CHECK(same(got, first ? whole.to(got.scalar_type()) : at::ones_like(got) * c10::Scalar(neutral)));
  };
  expect(local(ReduceOp::kSum, at::kDouble), 0);
  expect(local(ReduceOp::kProduct, at::kDouble), 1);
  expect(local(ReduceOp::kMax, at::kDouble), -std::numeric_limits<double>::infinity());
  expect(local(ReduceOp::kMin, at::kDouble), std::numeric_limits<double>::infinity());
  CHECK(same(local(ReduceOp::kAvg, at::kDouble), whole.to(at::kDouble)));
  const at::Tensor lowest = local(ReduceOp::kMax, at::kLong);
  const at::Tensor highest = local(ReduceOp::kMin, at::kShort), byte = local(ReduceOp::kMin, at::kByte);
  if (!first) {
    CHECK(lowest[0][0].item<int64_t>() == std::numeric_limits<int64_t>::min());
    CHECK(highest[0][0].item<int64_t>() == 32767);
    CHECK(byte[0][0].item<int64_t>() == 255);
  }
}

namespace {

// Is torch.chunk's rule as a user may write it; counts how often it is asked.
class Counted final : public Partition {
 public:
  Counted() : Partition("Counted", "") {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    ++asked_;
    const Interval range = chunk_range(size, parts, index);
    return one_interval(range.begin, range.end);
  }
  int asked() const { return asked_; }

 private:
  mutable std::atomic<int> asked_ = 0;
};

}  // namespace

TESSERA_RANKS_TEST_CASE("a user's partition is asked once, while a tensor has its layout", {2}) {
  const DeviceMesh mesh = line();
  const auto counted = std::make_shared<const Counted>();
  const at::Tensor source = spread(whole_numbers({6, 2}), mesh, {R});
  const at::Tensor first = redistribute(source, {Shard(0, counted)});
  const int asked = counted->asked();
  CHECK(asked > 0);
  const at::Tensor second = redistribute(source, {Shard(0, counted)});
  CHECK(counted->asked() == asked);
  CHECK(same(to_local(second), to_local(first)));
}

// Tests cases that PyTorch 2.11's DTensor gets wrong or names in its tests, on four ranks against one process.

#include <optional>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns torch.chunk's parts as one process makes them, empty ones too.
std::vector<at::Tensor> chunks_of(const at::Tensor& t, int64_t parts) {
  std::vector<at::Tensor> out = t.chunk(parts);
  while (static_cast<int64_t>(out.size()) < parts) out.push_back(t.narrow(0, 0, 0));
  return out;
}

// Returns what _StridedShard(0, split_factor) gives each of `ranks`: its chunk of each of the tensor's chunks.
std::vector<at::Tensor> strided_parts(const at::Tensor& t, int64_t split_factor, int64_t ranks) {
  std::vector<std::vector<at::Tensor>> parts(static_cast<std::size_t>(ranks));
  for (const at::Tensor& chunk : chunks_of(t, split_factor)) {
    const std::vector<at::Tensor> cut = chunks_of(chunk, ranks);
    for (std::size_t rank = 0; rank < parts.size(); ++rank) parts[rank].push_back(cut[rank]);
  }
  std::vector<at::Tensor> out;
  for (const auto& part : parts) out.push_back(at::cat(part));
  return out;
}

// Returns the placement under which each rank has those elements of arange(n).
Placement interval_shard(const std::vector<at::Tensor>& parts) {
  std::vector<Intervals> lists;
  for (const at::Tensor& part : parts) {
    Intervals& list = lists.emplace_back();
    for (int64_t i = 0; i < part.numel(); ++i) {
      const auto element = part[i].item<int64_t>();
      append(list, {.begin = element, .end = element + 1});
    }
  }
  return IntervalShard(0, lists);
}

}  // namespace

TESSERA_RANKS_TEST_CASE(
    "V1: five rows as [S(0), S(0)] on 2 x 2 are gathered by one all_gather, with the flattened mesh there", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const DeviceMesh flat = mesh.flatten({0, 1});
  const at::Tensor whole = sample({5, 3});
  const at::Tensor t = distribute_tensor(whole, mesh, {S0, S0});
  const CommCounter counter(mesh);
  CHECK(same(to_local(redistribute(t, {R, R})), whole));
  CHECK(counter.count("all_gather") == 1);
  CHECK(counter.total() == 1);
  // On the flattened mesh the pieces differ: 2, 2, 1 and 0 rows there, 2, 1, 1 and 1 on 2 x 2.
  CHECK(to_local(t).size(0) == std::vector<int64_t>{2, 1, 1, 1}[static_cast<std::size_t>(rank())]);
  CHECK(same(full_tensor(distribute_tensor(whole, flat, {S0})), whole));
}

TESSERA_RANKS_TEST_CASE("V6: Partial and Replicate of int64 add up to int64, exact above what a float holds", {4}) {
  const DeviceMesh mesh = line();
  constexpr int64_t kLarge = (int64_t{1} << 53) + 1;  // not representable as a double
  const at::Tensor value = whole_numbers({5, 3}, at::kLong) + kLarge, other = whole_numbers({5, 3}, at::kLong, 1) * 3;
  const at::Tensor pending = spread(value, mesh, {P}), replicated = spread(other, mesh, {R});
  CHECK(same(full_tensor(pending + replicated), value + other));
  CHECK(same(full_tensor(replicated + pending), other + value));
  CHECK(same(full_tensor(pending - replicated), value - other));
  CHECK(same(full_tensor(redistribute(replicated, {P})), other));
}

TESSERA_RANKS_TEST_CASE("V8: nine elements as _StridedShard(0, 2) on four ranks are scattered, uneven as they are",
                        {4}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = at::arange(9, on(at::kLong));
  const std::vector<at::Tensor> parts = strided_parts(whole, 2, 4);
  const Placement strided = interval_shard(parts);
  CHECK(to_string(strided) == "IS(0,0-2+5-6,2-4+6-7,4-5+7-8,8-9)");
  for (const int64_t source : {kMeshFirstRank, int64_t{2}, kNoSource}) {
    const at::Tensor t = distribute_tensor(whole, mesh, {strided}, source);
    CHECK(same(to_local(t), parts[static_cast<std::size_t>(rank())]));
    CHECK(same(full_tensor(t), whole));
    CHECK(same(to_local(redistribute(t, {S0})), piece_of(whole, mesh, {S0})));
    CHECK(same(to_local(redistribute(redistribute(t, {S0}), {strided})), parts[static_cast<std::size_t>(rank())]));
  }
}

TESSERA_RANKS_TEST_CASE(
    "V8: nine elements as [_StridedShard(0, 2), Shard(0)] on 2 x 2 are what the mesh dimensions cut one after the "
    "other",
    {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const at::Tensor whole = at::arange(9, on(at::kLong));
  const Placements placements = {S0.ordered(1), S0};
  const at::Tensor half = chunks_of(whole, 2)[static_cast<std::size_t>(mesh.local_rank(1))];
  const at::Tensor mine = chunks_of(half, 2)[static_cast<std::size_t>(mesh.local_rank(0))];
  for (const int64_t source : {kMeshFirstRank, int64_t{3}, kNoSource}) {
    const at::Tensor t = distribute_tensor(whole, mesh, placements, source);
    CHECK(same(to_local(t), mine));
    CHECK(same(full_tensor(t), whole));
  }
}

TESSERA_RANKS_TEST_CASE(
    "7: forward_dtype and backward_dtype, each of none, float and bfloat16: the dtypes sent both ways and of the "
    "results",
    {4}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = whole_numbers({13, 3}, at::kFloat), weight = whole_numbers({13, 3}, at::kFloat, 1);
  const std::vector<std::optional<at::ScalarType>> dtypes = {std::nullopt, at::kFloat, at::kBFloat16};
  for (const auto& forward : dtypes) {
    for (const auto& backward : dtypes) {
      const at::ScalarType there = forward.value_or(at::kFloat), back = backward.value_or(at::kFloat);
      CAPTURE(there);
      CAPTURE(back);
      at::Tensor leaf = distribute_tensor(whole, mesh, {S0}, kNoSource);
      leaf.requires_grad_(true);
      CommCounter counter(mesh);
      const at::Tensor all = redistribute(leaf, {R}, {.forward_dtype = forward, .backward_dtype = backward});
      CHECK(counter.bytes("all_gather") == to_local(leaf).numel() * static_cast<int64_t>(c10::elementSize(there)));
      CHECK(same(to_local(all).detach(), whole.to(there)));
      counter.reset();
      // Every rank passes the gradient as its term.
      (to_local(all, Placements{P}) * weight.to(there)).sum().backward();
      CHECK(counter.bytes("reduce_scatter") == whole.numel() * static_cast<int64_t>(c10::elementSize(back)));
      CHECK(counter.total() == 1);
      CHECK(placements_of(leaf.grad()) == Placements{S0});
      CHECK(same(to_local(leaf.grad()), piece_of(weight * 4, mesh, {S0})));
    }
  }
}

#include "tessera/tests/dtensor/redistribute/pairs.h"

#include <algorithm>
#include <random>
#include <stdexcept>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/placement/layout.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"

namespace tessera::testing {
namespace {

// Gives all parts but the last a short size, and the last the rest; with two parts or more the first is empty.
std::vector<int64_t> ragged_sizes(int64_t size, int64_t parts) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(parts), size / (2 * parts));
  if (parts > 1) sizes.front() = 0;
  int64_t rest = size;
  for (const int64_t each : sizes) rest -= each;
  sizes.back() += rest;
  return sizes;
}

// Gives element i to part (2 * i + 1) % parts, so that parts are made of runs of one element.
std::vector<Intervals> dealt(int64_t size, int64_t parts) {
  std::vector<Intervals> out(static_cast<std::size_t>(parts));
  for (int64_t i = 0; i < size; ++i)
    append(out[static_cast<std::size_t>((i * 2 + 1) % parts)], {.begin = i, .end = i + 1});
  return out;
}

// Returns every legal list of `kinds` and of a RaggedShard of each mesh dimension's size, which has one of `last` too
// on the last mesh dimension.
std::vector<Placements> layouts_of(Placements kinds, const Placements& last, const std::vector<int64_t>& shape,
                                   const std::vector<int64_t>& mesh_shape) {
  const Mesh mesh(mesh_shape);
  for (const int64_t n : mesh_shape) kinds.push_back(RaggedShard(0, ragged_sizes(shape[0], n)));
  std::vector<Placements> all = all_layouts(mesh.ndim(), kinds);
  for (const Placements& start : all_layouts(mesh.ndim() - 1, kinds)) {
    for (const Placement& placement : last) {
      all.push_back(start);
      all.back().push_back(placement);
    }
  }
  std::vector<Placements> out;
  for (const Placements& layout : all) {
    const Placements normal = normalize(layout, mesh, 2, "test");
    if (std::ranges::find(out, normal) == out.end() && partials_commute(normal) && is_layout(normal, mesh, shape))
      out.push_back(normal);
  }
  return out;
}

// Says of one thing that a redistribution must keep whether it has kept it on this rank.
struct Fact {
  const char* otherwise;  // names what is wrong if it does not hold
  bool holds;
};
using Facts = std::vector<Fact>;

void require(const Fact& fact, const Pair& pair, at::IntArrayRef shape, const DeviceMesh& mesh) {
  if (fact.holds) return;
  throw std::runtime_error(fmt::format("{}: {} -> {} of [{}] on {}, rank {}", fact.otherwise, to_string(pair.from),
                                       to_string(pair.to), fmt::join(shape, ", "), mesh.to_string(),
                                       mesh.world().rank()));
}

// Says whether `t` has the value `whole`, from its pieces where these are parts of the value.
bool is_value(const at::Tensor& t, const at::Tensor& whole, double tolerance = 0) {
  const Placements& placements = placements_of(t);
  const bool pending = any_partial(placements);
  const at::Tensor got = pending ? full_tensor(t) : to_local(t);
  const at::Tensor want = pending ? whole : piece_of(whole, mesh_of(t), placements);
  return tolerance == 0 ? same(got, want) : close(got, want, tolerance);
}

Facts facts_of_moves(const Pair& pair, const at::Tensor& whole, const DeviceMesh& mesh, double tolerance) {
  const at::Tensor source = spread(whole, mesh, pair.from);
  const at::Tensor before = to_local(source).clone();
  const at::Tensor moved = redistribute(source, pair.to);
  const bool apart = pair.from == pair.to || !to_local(moved).is_alias_of(to_local(source));
  const at::Tensor back = redistribute(moved, pair.from);
  return {{"laid out otherwise", placements_of(moved) == pair.to},
          {"the sizes", moved.sizes() == whole.sizes()},
          {"the value", is_value(moved, whole, tolerance)},
          {"the result shares the source's memory", apart},
          {"the source was written", same(to_local(source), before)},
          {"another layout after the way back", placements_of(back) == pair.from},
          {"another value after the way back", is_value(back, whole, tolerance)}};
}

Facts facts_of_gradient(const Pair& pair, const std::vector<int64_t>& shape, const DeviceMesh& mesh) {
  const at::Tensor weight = whole_numbers(shape, at::kDouble, 1);
  at::Tensor source = spread(whole_numbers(shape), mesh, pair.from);
  source.requires_grad_(true);
  (full_tensor(redistribute(source, pair.to)) * weight).sum().backward();
  return {{"the gradient's layout", placements_of(source.grad()) == without_partial(pair.from)},
          {"the gradient", is_value(source.grad(), weight)}};
}

}  // namespace

std::vector<Placements> built_in_layouts(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape) {
  const Mesh mesh(mesh_shape);
  // Lists are on the last mesh dimension alone, since the number of pairs grows with the square of the layouts.
  std::vector<Placements> out =
      layouts_of({Replicate(), Shard(0), Shard(1), Shard(0).ordered(1), BlockCyclic(0, 2), BlockCyclic(1, 1), Partial(),
                  Partial(ReduceOp::kAvg), Partial(ReduceOp::kMax), Partial(ReduceOp::kMin),
                  Partial(ReduceOp::kProduct), NormPartial(2), MaskedPartial()},
                 {IntervalShard(0, dealt(shape[0], mesh_shape.back()))}, shape, mesh_shape);
  const Placements together(mesh_shape.size(), RaggedShard(1, ragged_sizes(shape[1], mesh.size())));
  const Placements lists(mesh_shape.size(), IntervalShard(0, dealt(shape[0], mesh.size())));
  for (const Placements& layout : {together, lists}) {
    if (std::ranges::find(out, layout) == out.end()) out.push_back(layout);
  }
  return out;
}

std::vector<Placements> integer_layouts(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape) {
  return layouts_of(
      {Replicate(), Shard(0), Shard(1), Shard(0).ordered(1), BlockCyclic(0, 2), Partial(), Partial(ReduceOp::kMax),
       Partial(ReduceOp::kBitAnd), Partial(ReduceOp::kBitOr), Partial(ReduceOp::kBitXor)},
      {}, shape, mesh_shape);
}

// Takes eight layouts by eight at a time, and each pair after its reverse, so that few routes are made twice: a
// thousand are cached.
std::vector<Pair> all_pairs(const std::vector<Placements>& layouts) {
  constexpr std::size_t kBlock = 8;
  std::vector<Pair> out;
  const auto add = [&](std::size_t i, std::size_t j) {
    out.push_back({.from = layouts[i], .to = layouts[j]});
    if (i != j) out.push_back({.from = layouts[j], .to = layouts[i]});
  };
  for (std::size_t a = 0; a < layouts.size(); a += kBlock) {
    for (std::size_t b = 0; b <= a; b += kBlock) {
      for (std::size_t i = a; i < std::min(a + kBlock, layouts.size()); ++i) {
        for (std::size_t j = b; j < std::min(b + kBlock, i + 1); ++j) add(i, j);
      }
    }
  }
  return out;
}

std::vector<Pair> some_pairs(const std::vector<Placements>& layouts, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Pair> out;
  for (int64_t i = 0; i < count; ++i) {
    const Placements& from = layouts[random() % layouts.size()];
    out.push_back({.from = from, .to = layouts[random() % layouts.size()]});
  }
  return out;
}

void check_pair(const Pair& pair, const at::Tensor& whole, const DeviceMesh& mesh, double tolerance) {
  for (const Fact& fact : facts_of_moves(pair, whole, mesh, tolerance)) require(fact, pair, whole.sizes(), mesh);
}

void check_gradient(const Pair& pair, const std::vector<int64_t>& shape, const DeviceMesh& mesh) {
  for (const Fact& fact : facts_of_gradient(pair, shape, mesh)) require(fact, pair, shape, mesh);
}

void check_pairs(const std::vector<Pair>& pairs, const std::vector<int64_t>& shape, const DeviceMesh& mesh,
                 at::ScalarType dtype) {
  const at::Tensor whole = whole_numbers(shape, dtype);
  for (const Pair& pair : pairs) {
    const auto assert_each = [&](const Facts& facts) {
      for (const Fact& fact : facts) REQUIRE_NOTHROW(require(fact, pair, shape, mesh));
    };
    assert_each(facts_of_moves(pair, whole, mesh, 0));
    if (whole.is_floating_point()) assert_each(facts_of_gradient(pair, shape, mesh));
  }
}

void check_in_process(const std::vector<Pair>& pairs, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& mesh_shape, at::ScalarType dtype) {
  run_in_process(Mesh(mesh_shape).size(), [&](const std::shared_ptr<World>& world) {
    check_pairs(pairs, shape, init_device_mesh(device_name(), mesh_shape, {}, world), dtype);
  });
}

}  // namespace tessera::testing

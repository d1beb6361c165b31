// Tests the tables of layouts and decisions, in one process.

#include "tessera/dtensor/core/spec.h"

#include <algorithm>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/mesh/in_process.h"

using namespace tessera;

namespace {

DeviceMesh fake_mesh(std::vector<int64_t> shape, int64_t rank = 0) {
  int64_t size = 1;
  for (const int64_t n : shape) size *= n;
  return init_device_mesh("cpu", std::move(shape), {}, World::fake(rank, size));
}

}  // namespace

TEST_CASE("equal layouts share one Spec; ids are never used again") {
  const DeviceMesh mesh = fake_mesh({4});
  SpecPtr a = intern_spec(mesh, {Shard(0)}, {8, 3}, at::kFloat);
  CHECK(a == intern_spec(mesh, {Shard(0)}, {8, 3}, {3, 1}, at::kFloat));
  CHECK(a != intern_spec(mesh, {Shard(0)}, {8, 3}, {1, 8}, at::kFloat));
  CHECK(a != intern_spec(mesh, {Shard(1)}, {8, 3}, at::kFloat));
  CHECK(a != intern_spec(mesh, {Shard(0)}, {8, 3}, at::kDouble));
  CHECK(a != intern_spec(fake_mesh({4}), {Shard(0)}, {8, 3}, at::kFloat));
  CHECK(a == with_placements(*with_placements(*a, {Replicate()}), {Shard(0)}));
  const uint64_t id = a->id;
  a.reset();
  CHECK(intern_spec(mesh, {Shard(0)}, {8, 3}, at::kFloat)->id > id);
}

TEST_CASE("a Spec says what this rank holds") {
  const SpecPtr spec = intern_spec(fake_mesh({2, 2}, 3), {Shard(0), Partial()}, {5, 3}, at::kFloat);
  CHECK(spec->local_sizes == std::vector<int64_t>{2, 3});
  CHECK(spec->tile[0] == Intervals{{.begin = 3, .end = 5}});
  CHECK(spec->sharded);
  CHECK(spec->partial);
  CHECK(spec->numel() == 15);
  CHECK(spec->local_numel() == 6);
  CHECK(to_string(*spec) == "Float [5, 3] on (2, 2) on cpu as [S(0), P(sum)]");
}

TEST_CASE("a thousand shapes leave no Spec behind") {
  const DeviceMesh mesh = fake_mesh({4});
  clear_dispatch_cache();
  const std::size_t before = interned_specs();
  for (int64_t n = 1; n <= 1000; ++n) {
    const at::Tensor x = tessera::ones({n, 2}, mesh, {Shard(0)});
    (void)to_local(x);
    intern_spec(mesh, {Shard(1)}, {n, n}, at::kFloat);
  }
  CHECK(interned_specs() <= before);
  // Cached decisions hold some Specs, at most as many as their limit allows.
  for (int64_t n = 1; n <= 3000; ++n) at::neg(tessera::ones({n, 2}, mesh, {Shard(0)}));
  CHECK(interned_specs() <= before + 3 * 1024);
  clear_dispatch_cache();
  CHECK(interned_specs() <= before);
}

TEST_CASE("an operand that is redistributed and freed after each call finds the decision in the next one") {
  const DeviceMesh mesh = fake_mesh({4});
  clear_dispatch_cache();
  const ImplicitReplication replicated;
  const at::Tensor x = tessera::ones({8, 2}, mesh, {Shard(0)});
  const at::Tensor plain = at::ones({8, 2});
  const auto misses = [&](auto&& make) {
    const uint64_t before = dispatch_statistics().misses;
    for (int i = 0; i < 10; ++i) (void)(x * make());
    return dispatch_statistics().misses - before;
  };
  CHECK(misses([&] { return plain; }) == 1);
  CHECK(misses([&] { return from_local(at::ones({8, 3}).narrow(1, 0, 2), mesh, {Replicate()}); }) == 1);
  CHECK(misses([&] { return from_local(at::ones({8, 1}), mesh, {Replicate()}); }) == 1);
}

TEST_CASE("a decision that every step uses stays among those of many shapes") {
  const DeviceMesh mesh = fake_mesh({4});
  clear_dispatch_cache();
  const at::Tensor x = tessera::ones({8, 2}, mesh, {Shard(0)});
  uint64_t misses = 0;
  for (int64_t n = 1; n <= 3000; ++n) {
    at::neg(tessera::ones({n, 3}, mesh, {Shard(0)}));
    const uint64_t before = dispatch_statistics().misses;
    at::neg(x);
    misses += dispatch_statistics().misses - before;
  }
  CHECK(misses == 1);
  clear_dispatch_cache();
}

TEST_CASE("decisions are cached, up to the limit") {
  const DeviceMesh mesh = fake_mesh({4});
  clear_dispatch_cache();
  const at::Tensor x = tessera::ones({8, 2}, mesh, {Shard(0)});
  DispatchStatistics before = dispatch_statistics();
  for (int i = 0; i < 10; ++i) at::add(x, x, i);
  DispatchStatistics after = dispatch_statistics();
  CHECK(after.misses == before.misses + 1);  // the number's value is not in the key
  CHECK(after.hits == before.hits + 9);
  CHECK(after.cached == before.cached + 1);
  CHECK(after.replicated == before.replicated);
  // The key holds everything that changes the decision.
  before = after;
  at::add(x, tessera::ones({8, 2}, mesh, {Replicate()}));
  at::add(x, tessera::ones({2}, mesh, {Replicate()}));
  at::add(x, tessera::ones({8, 2}, mesh, {Shard(0)}, at::kDouble));
  at::sum(x, 0);
  at::sum(x, 1);
  at::sum(x, 1, true);
  CHECK(dispatch_statistics().misses == before.misses + 6);
  for (int64_t n = 1; n <= 1500; ++n) at::neg(tessera::ones({n}, mesh, {Replicate()}));
  CHECK(dispatch_statistics().cached <= 1024 + 100);
  clear_dispatch_cache();
  CHECK(dispatch_statistics().cached == 0);
}

TEST_CASE("decisions of runs that are over are dropped, so that their worlds end") {
  clear_dispatch_cache();
  std::vector<std::weak_ptr<World>> worlds(100);
  for (std::size_t run = 0; run < worlds.size(); ++run) {
    run_in_process(2, [&](const std::shared_ptr<World>& world) {
      if (world->rank() == 0) worlds[run] = world;
      const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
      const at::Tensor x = tessera::ones({8, 2}, mesh, {Shard(0)});
      full_tensor(at::neg(at::add(x, x)));
    });
  }
  CHECK(std::ranges::count_if(worlds, [](const auto& world) { return !world.expired(); }) <= 8);
  // Decisions of a world that is not retired stay.
  const DeviceMesh mesh = fake_mesh({4});
  for (int64_t n = 1; n <= 100; ++n) at::sum(tessera::ones({n, 2}, mesh, {Replicate()}), 0);
  const uint64_t misses = dispatch_statistics().misses;
  for (int64_t n = 1; n <= 100; ++n) at::sum(tessera::ones({n, 2}, mesh, {Replicate()}), 0);
  CHECK(dispatch_statistics().misses == misses);
  clear_dispatch_cache();
}

TEST_CASE("an operator without a rule is counted") {
  const DeviceMesh mesh = fake_mesh({4});
  const at::Tensor x = tessera::ones({8, 8}, mesh, {Replicate()});
  const DispatchStatistics before = dispatch_statistics();
  at::nonzero(x);
  CHECK(dispatch_statistics().replicated == before.replicated + 1);
}

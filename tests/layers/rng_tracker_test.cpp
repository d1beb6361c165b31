#include "tessera/layers/rng_tracker.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor draw() { return at::randn({12, 21}, on(at::kFloat)); }

at::Tensor drawn_from(uint64_t seed) {
  at::manual_seed(seed);
  return draw();
}

}  // namespace

TEST_CASE("streams and the default generator draw in turn, and none disturbs another") {
  at::manual_seed(1234);
  const std::vector<at::Tensor> plain = {draw(), draw(), draw()};
  at::manual_seed(4321);
  const std::vector<at::Tensor> named = {draw(), draw()};
  at::manual_seed(1234);
  RngStatesTracker tracker(device());
  tracker.add("test", 4321);
  CHECK(same(draw(), plain[0]));
  {
    const auto fork = tracker.fork("test");
    CHECK(same(draw(), named[0]));
  }
  CHECK(same(draw(), plain[1]));
  {
    const auto fork = tracker.fork("test");
    CHECK(same(draw(), named[1]));
  }
  CHECK(same(draw(), plain[2]));
}

TEST_CASE("a fork that an exception ends leaves the generator where it was, and the stream where it got to") {
  at::manual_seed(1);
  const std::vector<at::Tensor> plain = {draw()};
  const std::vector<at::Tensor> named = {drawn_from(2), draw()};
  at::manual_seed(1);
  RngStatesTracker tracker(device());
  tracker.add("test", 2);
  CHECK_THROWS_WITH_AS(
      [&] {
        const auto fork = tracker.fork("test");
        draw();
        throw std::runtime_error("out");
      }(),
      "out", std::runtime_error);
  CHECK(same(draw(), plain[0]));
  const auto fork = tracker.fork("test");
  CHECK(same(draw(), named[1]));
}

TEST_CASE("nested_forks: an inner fork goes on where the outer is, of the same stream and of another") {
  const std::vector<at::Tensor> first = {drawn_from(10), draw(), draw(), draw()};
  const std::vector<at::Tensor> second = {drawn_from(20), draw()};
  at::manual_seed(30);
  const at::Tensor plain = draw();
  at::manual_seed(30);
  RngStatesTracker tracker(device());
  tracker.add("first", 10);
  tracker.add("second", 20);
  {
    const auto outer = tracker.fork("first");
    CHECK(same(draw(), first[0]));
    {
      const auto inner = tracker.fork("first");
      CHECK(same(draw(), first[1]));
    }
    CHECK(same(draw(), first[2]));
    {
      const auto inner = tracker.fork("second");
      CHECK(same(draw(), second[0]));
    }
    CHECK(same(draw(), first[3]));
  }
  CHECK(same(draw(), plain));
  const auto fork = tracker.fork("second");
  CHECK(same(draw(), second[1]));
}

TEST_CASE("names and seeds that are there are refused, and have changed nothing") {
  RngStatesTracker tracker(device());
  tracker.add("a", 5);
  at::manual_seed(6);
  const at::Tensor next = draw();
  at::manual_seed(6);
  CHECK_THROWS_WITH_AS(tracker.add("a", 7), "RngStatesTracker: rng state a already exists", std::invalid_argument);
  CHECK_THROWS_WITH_AS(tracker.add("b", 5), "RngStatesTracker: seed 5 already exists", std::invalid_argument);
  CHECK(same(draw(), next));
  tracker.add("b", 7);  // the seed of the failed call was not taken
  CHECK(tracker.get_states().size() == 2);
  CHECK_THROWS_WITH_AS(
      (void)tracker.fork(),
      doctest::Contains("model-parallel-rng is not added; there are [a, b]. Call model_parallel_manual_seed"),
      std::invalid_argument);
  tracker.reset();
  CHECK(tracker.get_states().empty());
  tracker.add("a", 5);
}

TEST_CASE("states are copies that can be set again, but not while a stream is drawn from") {
  RngStatesTracker tracker(device());
  tracker.add("a", 5);
  const auto states = tracker.get_states();
  const auto one = [&] {
    const auto fork = tracker.fork("a");
    return draw();
  };
  const at::Tensor first = one();
  CHECK_FALSE(same(one(), first));
  tracker.set_states(states);
  CHECK(same(one(), first));
  const auto fork = tracker.fork("a");
  CHECK_THROWS_WITH_AS(tracker.reset(), doctest::Contains("end the fork first"), std::logic_error);
  CHECK_THROWS_WITH_AS(tracker.set_states(states), doctest::Contains("end the fork first"), std::logic_error);
}

TEST_CASE("states that the generator does not take are refused, and leave neither a fork nor another state behind") {
  RngStatesTracker tracker(device());
  tracker.add("a", 5);
  const auto states = tracker.get_states();
  const std::string text = "the state of \"b\" is no state of the generator of " + device_name();
  CHECK_THROWS_WITH_AS(tracker.set_states({{"b", at::ones({3})}}), doctest::Contains(text.c_str()),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(tracker.set_states({{"a", states.at("a")}, {"b", at::Tensor()}}),
                       doctest::Contains(text.c_str()), std::invalid_argument);
  CHECK(tracker.get_states().size() == 1);
  CHECK(same(tracker.get_states().at("a"), states.at("a")));
  at::manual_seed(6);
  const at::Tensor next = draw();
  at::manual_seed(6);
  tracker.set_position({.states = {{"a", states.at("a")}, {"b", at::ones({3})}}, .active = std::nullopt});
  const char* const no_state = "RNG state must be a torch.ByteTensor";
  CHECK_THROWS_WITH_AS((void)tracker.fork("b"), doctest::Contains(no_state), c10::Error);
  CHECK(same(draw(), next));
  const at::Tensor first = drawn_from(5);
  {
    const auto outer = tracker.fork("a");
    CHECK_THROWS_WITH_AS((void)tracker.fork("b"), doctest::Contains(no_state), c10::Error);
    CHECK(same(draw(), first));
  }
  tracker.reset();
}

TESSERA_RANKS_TEST_CASE("model parallel seeds: Megatron's offsets, DTensors seeded alike", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto me = static_cast<uint64_t>(mesh.local_rank(0));
  // Returns what the stream, or without a name the default generator, draws right after seeding.
  const auto drawn = [&](const std::string& stream) {
    model_parallel_manual_seed(12345, mesh, mesh);
    if (stream.empty()) return draw();
    const auto fork = rng_tracker(mesh.device()).fork(stream);
    return draw();
  };
  CHECK(same(drawn(""), drawn_from(12345)));
  CHECK(same(drawn(kModelParallelRng), drawn_from(12345 + 2718 + me)));
  CHECK(same(drawn(data_parallel_rng_tracker_name()), drawn_from(12345)));
  CHECK(same(drawn(expert_parallel_rng_tracker_name()), drawn_from(12345 + 1024 + 101 * me)));
  const auto sharded = [&](uint64_t seed) {
    model_parallel_manual_seed(seed, mesh);
    return full_tensor(tessera::rand({5, 3}, mesh, {Shard(0)}));
  };
  const at::Tensor once = sharded(1);
  CHECK(same(sharded(1), once));
  CHECK_FALSE(same(sharded(2), once));
}

TESSERA_RANKS_TEST_CASE("replicas draw their own plain numbers, and the same DTensors", {4}) {
  const DeviceMesh plane = mesh_over({2, 2});
  const auto replica = static_cast<uint64_t>(plane.local_rank(0));
  model_parallel_manual_seed(5, plane["d1"], std::nullopt, 100 * replica);
  CHECK(at::globalContext().defaultGenerator(plane.device()).current_seed() == 5 + 100 * replica);
  const at::Tensor drawn = full_tensor(tessera::rand({5, 3}, plane, {Shard(0), Shard(1)}));
  manual_seed(5, plane.world());
  CHECK(same(full_tensor(tessera::rand({5, 3}, plane, {Replicate(), Shard(0)})), drawn));
}

TESSERA_RANKS_TEST_CASE("model parallel seeds: the stream of experts differs by the place on each of the two meshes",
                        {4}) {
  const DeviceMesh plane = mesh_over({2, 2});
  const auto expert = static_cast<uint64_t>(plane.local_rank(0)), tensor = static_cast<uint64_t>(plane.local_rank(1));
  const auto drawn = [&](const std::string& stream) {
    const auto fork = rng_tracker(plane.device()).fork(stream);
    return draw();
  };
  model_parallel_manual_seed(7, plane["d1"], plane["d0"]);
  CHECK(same(drawn(kModelParallelRng), drawn_from(7 + 2718 + tensor)));
  CHECK(same(drawn(expert_parallel_rng_tracker_name()), drawn_from(7 + 1024 + 100 * expert + tensor)));
  model_parallel_manual_seed(7, ModelParallelSeeds{.tensor_rank = 1, .expert_rank = 3, .device = plane.device()});
  CHECK(same(drawn(kModelParallelRng), drawn_from(7 + 2718 + 1)));
  CHECK(same(drawn(expert_parallel_rng_tracker_name()), drawn_from(7 + 1024 + 300 + 1)));
}

TEST_CASE("model parallel seeds: ranks that there are not") {
  CHECK_THROWS_WITH_AS(model_parallel_manual_seed(1, ModelParallelSeeds{.tensor_rank = -1}),
                       doctest::Contains("tensor rank -1"), std::invalid_argument);
}

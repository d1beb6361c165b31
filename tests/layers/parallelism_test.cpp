#include "tessera/layers/parallelism.h"

#include <set>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;

namespace {

using Groups = std::vector<std::vector<int64_t>>;

// Ends the parallelism of a test case.
struct Parallelism {
  explicit Parallelism(const ParallelismOptions& options) : mesh(init_parallelism(options)) {}
  ~Parallelism() { reset_parallelism(); }
  Parallelism(const Parallelism&) = delete;
  Parallelism& operator=(const Parallelism&) = delete;
  DeviceMesh mesh;
};

void check_info(const GroupInfo& info, const Groups& groups, int64_t rank) {
  CAPTURE(rank);
  const std::vector<int64_t>* mine = nullptr;
  for (const auto& group : groups) {
    if (std::find(group.begin(), group.end(), rank) != group.end()) mine = &group;
  }
  REQUIRE(mine != nullptr);
  CHECK(info.global_ranks == *mine);
  CHECK(info.world_size == static_cast<int64_t>(mine->size()));
  CHECK((*mine)[static_cast<std::size_t>(info.rank)] == rank);
  CHECK(info.mesh.mesh().ranks() == *mine);
}

}  // namespace

TEST_CASE("eight ranks, model 2 and pipeline 2: every rank learns its groups") {
  for (int64_t rank = 0; rank < 8; ++rank) {
    const Parallelism parallelism({.model = 2, .pipeline = 2, .world = World::fake(rank, 8)});
    const ParallelGroupInfo info = parallel_group_info();
    check_info(info.mp, {{0, 1}, {2, 3}, {4, 5}, {6, 7}}, rank);
    check_info(info.pp, {{0, 2}, {1, 3}, {4, 6}, {5, 7}}, rank);
    check_info(info.dp, {{0, 4}, {1, 5}, {2, 6}, {3, 7}}, rank);
    check_info(*default_group_info(), {{0, 1, 2, 3, 4, 5, 6, 7}}, rank);
    CHECK(parallelism.mesh.to_string() == "{dp: 2, pp: 2, mp: 2} on cpu");
  }
}

TEST_CASE("any world: the groups of each kind hold every rank once, and what is left is data parallel") {
  for (const auto& [size, model, pipeline] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {1, 1, 1}, {4, 2, 1}, {4, 1, 4}, {6, 3, 1}, {12, 2, 3}, {12, 12, 1}}) {
    std::set<std::vector<int64_t>> mp, pp, dp;
    for (int64_t rank = 0; rank < size; ++rank) {
      const Parallelism parallelism({.model = model, .pipeline = pipeline, .world = World::fake(rank, size)});
      const ParallelGroupInfo info = parallel_group_info();
      mp.insert(info.mp.global_ranks);
      pp.insert(info.pp.global_ranks);
      dp.insert(info.dp.global_ranks);
      CHECK(info.mp.world_size == model);
      CHECK(info.pp.world_size == pipeline);
      CHECK(info.dp.world_size == size / (model * pipeline));
      CHECK(info.mp.global_ranks[static_cast<std::size_t>(info.mp.rank)] == rank);
    }
    CHECK(static_cast<int64_t>(mp.size()) == size / model);
    CHECK(static_cast<int64_t>(pp.size()) == size / pipeline);
    CHECK(static_cast<int64_t>(dp.size()) == model * pipeline);
  }
}

TEST_CASE("parallelism begins once, and again after a reset") {
  CHECK_FALSE(parallelism_is_initialized());
  CHECK_FALSE(default_group_info().has_value());
  CHECK_THROWS_WITH_AS(parallel_group_info(), doctest::Contains("call init_parallelism first"), ParallelismError);
  reset_parallelism();  // nothing to forget
  init_parallelism({.model = 2, .world = World::fake(0, 4)});
  CHECK(parallelism_is_initialized());
  const ParallelGroupInfo kept = parallel_group_info();
  CHECK_THROWS_WITH_AS(init_parallelism({.world = World::fake(0, 4)}),
                       doctest::Contains("{dp: 2, pp: 1, mp: 2} on cpu; call reset_parallelism first"),
                       ParallelismError);
  reset_parallelism();
  CHECK_FALSE(parallelism_is_initialized());
  CHECK(kept.mp.mesh.size() == 2);
  CHECK(kept.dp.global_ranks == std::vector<int64_t>{0, 2});
  init_parallelism({.model = 4, .world = World::fake(3, 4)});
  CHECK(parallel_group_info().mp.rank == 3);
  reset_parallelism();
}

TEST_CASE("sizes that do not fit the world are refused, and leave nothing behind") {
  const auto begin = [](int64_t model, int64_t pipeline, int64_t size) {
    init_parallelism({.model = model, .pipeline = pipeline, .world = World::fake(0, size)});
  };
  CHECK_THROWS_WITH_AS(begin(3, 1, 8),
                       doctest::Contains("model 3 times pipeline 1 does not divide the world of 8 ranks"),
                       ParallelismError);
  CHECK_THROWS_WITH_AS(begin(2, 3, 8), doctest::Contains("model 2 times pipeline 3"), ParallelismError);
  CHECK_THROWS_WITH_AS(begin(16, 1, 8), doctest::Contains("model 16"), ParallelismError);
  CHECK_THROWS_WITH_AS(begin(0, 1, 8), doctest::Contains("both are at least 1"), ParallelismError);
  CHECK_THROWS_WITH_AS(begin(1, -2, 8), doctest::Contains("pipeline -2"), ParallelismError);
  CHECK_FALSE(parallelism_is_initialized());
}

TEST_CASE("each kind of group has its own backend and timeout") {
  for (std::size_t kind = 0; kind < 3; ++kind) {
    CAPTURE(kind);
    std::vector<GroupOptions> given(3);
    const auto options = [&] {
      return ParallelismOptions{.model = 2,
                                .pipeline = 2,
                                .model_group = given[0],
                                .pipeline_group = given[1],
                                .data_group = given[2],
                                .world = World::fake(0, 8)};
    };
    given[kind] = {.timeout = std::chrono::seconds(7), .backend = "gloo"};
    const Parallelism parallelism(options());
    const ParallelGroupInfo info = parallel_group_info();
    const std::vector<const GroupInfo*> groups = {&info.mp, &info.pp, &info.dp};
    for (std::size_t i = 0; i < 3; ++i) CHECK(groups[i]->mesh.group_options(0).timeout.has_value() == (i == kind));
    CHECK(groups[kind]->mesh.group_options(0).timeout == std::chrono::seconds(7));
    reset_parallelism();
    given[kind].backend = "carrier_pigeon";
    CHECK_THROWS_WITH_AS(init_parallelism(options()), doctest::Contains("carrier_pigeon"), std::invalid_argument);
    CHECK_FALSE(parallelism_is_initialized());
  }
}

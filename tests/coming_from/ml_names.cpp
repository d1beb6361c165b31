// Tests the names of documents 000 and 002, ml's functions and groups, with each of their parameters, against one
// process.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/layers/init_type.h"
#include "tessera/layers/parallelism.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("mp_copy", {3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 3}), grads = sample({mesh.size(), 4, 3}, 2), mine = grads[mesh.local_rank(0)];
  SUBCASE("x") {
    check_region([&](const at::Tensor& t) { return copy_to_region(t, mesh); }, x, x, mine, grads.sum(0));
  }
  SUBCASE("op") {
    const auto reduced_by = [&](ReduceOp op) {
      return [&, op](const at::Tensor& t) { return copy_to_region(t, mesh, op); };
    };
    check_region(reduced_by(ReduceOp::kAvg), x, x, mine, grads.mean(0));
    check_region(reduced_by(ReduceOp::kMax), x, x, mine, grads.amax(0));
  }
}

TESSERA_RANKS_TEST_CASE("mp_reduce", {3}) {
  const DeviceMesh mesh = line();
  const at::Tensor terms = sample({mesh.size(), 4, 3}), mine = terms[mesh.local_rank(0)], g = sample({4, 3}, 2);
  SUBCASE("x") {
    check_region([&](const at::Tensor& t) { return reduce_from_region(t, mesh); }, mine, terms.sum(0), g, g);
  }
  SUBCASE("op") {
    const auto reduced_by = [&](ReduceOp op) {
      return [&, op](const at::Tensor& t) { return reduce_from_region(t, mesh, op); };
    };
    const auto n = static_cast<double>(mesh.size());
    check_region(reduced_by(ReduceOp::kAvg), mine, terms.mean(0), g, g / n);
    const at::Tensor largest = terms.amax(0);
    check_region(reduced_by(ReduceOp::kMax), mine, largest, g, g * (mine == largest));
  }
}

TESSERA_RANKS_TEST_CASE("mp_scatter", {3}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  const at::Tensor whole = sample({n, 3 * n, 2 * n}), g = sample({n, 3 * n, 2 * n}, 2);
  const auto part = [&](const at::Tensor& t, int64_t dim) { return piece_of(t, mesh, {Shard(dim)}); };
  SUBCASE("x") {
    check_region([&](const at::Tensor& t) { return scatter_to_region(t, mesh); }, whole, part(whole, 2), part(g, 2), g);
  }
  SUBCASE("dim") {
    for (const int64_t dim : {0, 1, -2}) {
      const int64_t cut = dim < 0 ? dim + 3 : dim;
      check_region([&](const at::Tensor& t) { return scatter_to_region(t, mesh, dim); }, whole, part(whole, cut),
                   part(g, cut), g);
    }
  }
}

TESSERA_RANKS_TEST_CASE("mp_gather", {3}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  const at::Tensor whole = sample({n, 3 * n, 2 * n}), g = sample({n, 3 * n, 2 * n}, 2);
  const auto part = [&](const at::Tensor& t, int64_t dim) { return piece_of(t, mesh, {Shard(dim)}); };
  SUBCASE("x") {
    check_region([&](const at::Tensor& t) { return gather_from_region(t, mesh); }, part(whole, 2), whole, g,
                 part(g, 2));
  }
  SUBCASE("dim") {
    for (const int64_t dim : {0, 1, -2}) {
      const int64_t cut = dim < 0 ? dim + 3 : dim;
      check_region([&](const at::Tensor& t) { return gather_from_region(t, mesh, {.tensor_dim = dim}); },
                   part(whole, cut), whole, g, part(g, cut));
    }
  }
}

namespace {

// Describes a call of initialize_affine_weight_.
struct Affine {
  int64_t out = 16, in = 16;
  int64_t dim = 0;
  InitType type = InitType::kXavierNormal;
  int64_t stride = 1;
};

// Fills this rank's piece, and compares it with the blocks of the whole weight that this rank has.
void check_affine(const Affine& a, const DeviceMesh& mesh) {
  const int64_t n = mesh.size(), here = (a.dim == 0 ? a.out : a.in) / n;
  const at::Tensor piece =
      at::full(a.dim == 0 ? at::IntArrayRef{here, a.in} : at::IntArrayRef{a.out, here}, 7, at::kDouble);
  begin_draws(mesh);
  initialize_affine_weight_(piece, a.out, a.in, here, a.dim, mesh, init_method(a.type), a.stride);
  const at::Tensor whole = first_values(init_method(a.type), {a.out, a.in});
  std::vector<at::Tensor> mine;
  for (int64_t part = 0; part < a.stride; ++part) {
    mine.push_back(whole.chunk(n * a.stride, a.dim)[part * n + mesh.local_rank(0)]);
  }
  CHECK(same(piece, at::cat(mine, a.dim)));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("initialize_model_parallel_affine_weight_", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  // Checks that a piece [4, 6] that `a` does not describe is refused.
  const auto refused = [&](const Affine& a, int64_t here, const std::string& text) {
    check_refused(
        [&] {
          initialize_affine_weight_(at::empty({4, 6}), a.out, a.in, here, a.dim, mesh, init_method(a.type), a.stride);
        },
        text);
  };
  SUBCASE("weight") {
    check_affine({}, mesh);
    refused({.out = 5 * n, .in = 6}, 5, "a weight [4, 6] for 5 of");
  }
  SUBCASE("out_features") {
    for (const int64_t out : {8, 24}) check_affine({.out = out}, mesh);
    for (const int64_t out : {5, 7}) check_affine({.out = out, .dim = 1}, mesh);
    refused({.out = 5 * n, .in = 6}, 4, fmt::format("for 4 of [{}, 6] along 0", 5 * n));
    refused({.out = 5, .in = 6 * n, .dim = 1}, 6, fmt::format("for 6 of [5, {}] along 1", 6 * n));
  }
  SUBCASE("in_features") {
    for (const int64_t in : {5, 7}) check_affine({.in = in}, mesh);
    for (const int64_t in : {8, 24}) check_affine({.in = in, .dim = 1}, mesh);
    refused({.out = 4 * n, .in = 7}, 4, fmt::format("for 4 of [{}, 7] along 0", 4 * n));
    refused({.out = 4, .in = 7 * n, .dim = 1}, 6, fmt::format("for 6 of [4, {}] along 1", 7 * n));
  }
  SUBCASE("per_partition_size") {
    refused({.out = 4 * n, .in = 6}, 3, "a weight [4, 6] for 3 of");
    initialize_affine_weight_(at::empty({4, 6}), 4 * n, 6, 4, 0, mesh, init_method(InitType::kOnes));
  }
  SUBCASE("partition_dim") {
    for (const int64_t dim : {0, 1}) check_affine({.dim = dim}, mesh);
    refused({.out = 4 * n, .in = 6, .dim = 2}, 4, "partition_dim 2");
  }
  SUBCASE("init_type") {
    for (const InitType type : {InitType::kOrthogonal, InitType::kUniform, InitType::kKaimingNormal, InitType::kOnes}) {
      check_affine({.type = type}, mesh);
    }
  }
  SUBCASE("stride") {
    for (const int64_t dim : {0, 1}) check_affine({.dim = dim, .stride = 2}, mesh);
    refused({.out = 4 * n, .in = 6, .stride = 3}, 4, "with 3 pieces each");
  }
}

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

// Checks that groups of one kind take a backend and a time limit, and that the groups of other kinds do not.
void check_group_options(GroupOptions ParallelismOptions::*kind, GroupInfo ParallelGroupInfo::*group) {
  ParallelismOptions options{.model = 2, .pipeline = 2, .world = World::fake(0, 8)};
  options.*kind = {.timeout = std::chrono::seconds(7), .backend = "gloo"};
  {
    const Parallelism parallelism(options);
    const ParallelGroupInfo info = parallel_group_info();
    for (GroupInfo ParallelGroupInfo::*each :
         {&ParallelGroupInfo::mp, &ParallelGroupInfo::pp, &ParallelGroupInfo::dp}) {
      CHECK((info.*each).mesh.group_options(0).timeout.has_value() == (each == group));
    }
    CHECK((info.*group).mesh.group_options(0).timeout == std::chrono::seconds(7));
  }
  (options.*kind).backend = "carrier_pigeon";
  CHECK_THROWS_WITH_AS(init_parallelism(options), doctest::Contains("carrier_pigeon"), std::invalid_argument);
  CHECK_FALSE(parallelism_is_initialized());
}

// Checks that groups of one kind of this job's ranks are made by the backend that is named, and sum what these ranks
// have.
void check_group(GroupOptions ParallelismOptions::*kind, GroupInfo ParallelGroupInfo::*group, const Groups& ranks) {
  ParallelismOptions options{.model = 2, .pipeline = 1, .world = world()};
  if (kind == &ParallelismOptions::pipeline_group) options.pipeline = 2;
  options.*kind = {.backend = "gloo"};
  const Parallelism parallelism(options);
  const GroupInfo info = parallel_group_info().*group;
  check_info(info, ranks, world()->rank());
  CHECK(info.mesh.group(0)->getBackendName() == "gloo");
  double sum = 0;
  for (const int64_t rank : info.global_ranks) sum += static_cast<double>(rank + 1);
  const at::Tensor mine = at::full({2}, static_cast<double>(world()->rank() + 1), at::kDouble);
  CHECK(same(reduce_from_region(mine, info.mesh), at::full({2}, sum, at::kDouble)));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("init_parallelism", {4}) {
  const int64_t me = world()->rank();
  SUBCASE("model_parallelism") {
    for (const int64_t model : {1, 2, 4}) {
      const Parallelism parallelism({.model = model, .world = world()});
      CHECK(parallel_group_info().mp.world_size == model);
      CHECK(parallel_group_info().dp.world_size == 4 / model);
      CHECK(parallel_group_info().mp.global_ranks.front() == me / model * model);
    }
  }
  SUBCASE("pipeline_parallelism") {
    for (const int64_t stages : {1, 2, 4}) {
      const Parallelism parallelism({.pipeline = stages, .world = world()});
      CHECK(parallel_group_info().pp.world_size == stages);
      CHECK(parallel_group_info().pp.global_ranks.front() == me / stages * stages);
    }
  }
  SUBCASE("mp_backend") {
    check_group(&ParallelismOptions::model_group, &ParallelGroupInfo::mp, {{0, 1}, {2, 3}});
    check_group_options(&ParallelismOptions::model_group, &ParallelGroupInfo::mp);
  }
  SUBCASE("pp_backend") {
    check_group(&ParallelismOptions::pipeline_group, &ParallelGroupInfo::pp, {{0, 2}, {1, 3}});
    check_group_options(&ParallelismOptions::pipeline_group, &ParallelGroupInfo::pp);
  }
  SUBCASE("dp_backend") {
    check_group(&ParallelismOptions::data_group, &ParallelGroupInfo::dp, {{0, 2}, {1, 3}});
    check_group_options(&ParallelismOptions::data_group, &ParallelGroupInfo::dp);
  }
}

TEST_CASE("example: 8 ranks, MP/PP/DP groups") {
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

TEST_CASE("parallel_group_info") {
  CHECK_THROWS_WITH_AS(parallel_group_info(), doctest::Contains("call init_parallelism first"), ParallelismError);
  {
    const Parallelism parallelism({.model = 2, .world = World::fake(3, 4)});
    check_info(parallel_group_info().mp, {{0, 1}, {2, 3}}, 3);
    check_info(parallel_group_info().dp, {{0, 2}, {1, 3}}, 3);
  }
  const Parallelism again({.model = 4, .world = World::fake(3, 4)});
  CHECK(parallel_group_info().mp.rank == 3);
}

TEST_CASE("default_group_info") {
  CHECK_FALSE(default_group_info().has_value());
  const Parallelism parallelism({.model = 2, .world = World::fake(3, 4)});
  REQUIRE(default_group_info().has_value());
  check_info(*default_group_info(), {{0, 1, 2, 3}}, 3);
}

TEST_CASE("parallelism_is_initialized") {
  CHECK_FALSE(parallelism_is_initialized());
  {
    const Parallelism parallelism({.world = World::fake(0, 4)});
    CHECK(parallelism_is_initialized());
  }
  CHECK_FALSE(parallelism_is_initialized());
}

TEST_CASE("reset_parallelism") {
  reset_parallelism();  // nothing to forget
  init_parallelism({.model = 2, .world = World::fake(0, 4)});
  const ParallelGroupInfo kept = parallel_group_info();
  CHECK_THROWS_WITH_AS(init_parallelism({.world = World::fake(0, 4)}),
                       doctest::Contains("{dp: 2, pp: 1, mp: 2} on cpu; call reset_parallelism first"),
                       ParallelismError);
  reset_parallelism();
  CHECK_FALSE(parallelism_is_initialized());
  CHECK(kept.mp.mesh.size() == 2);
  CHECK(kept.dp.global_ranks == std::vector<int64_t>{0, 2});
}

TEST_CASE("ParallismError") {  // sizes that do not fit the world leave nothing behind
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

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/harness/refused.h"

#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <doctest/doctest.h>  // after torch, which has a CHECK of its own

using namespace tessera;
using tessera::testing::check_refused;
using Ints = std::vector<int64_t>;

namespace {

template <class M>
constexpr bool takes_double_braces = requires(const M& mesh) {
  mesh.flatten({{"dp", "tp"}});
}
|| requires(const M& mesh) { mesh.merged({{"dp", "tp"}}); }
|| requires(const M& mesh) { mesh[{{"dp", "tp"}}]; };

}  // namespace

TEST_CASE("a device mesh knows this rank's place") {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 3}, {"dp", "tp"}, World::fake(4, 6));
  CHECK(mesh.coordinate() == Ints{1, 1});
  CHECK(mesh.local_rank("dp") == 1);
  CHECK(mesh.local_rank(-1) == 1);
  CHECK(mesh.size("tp") == 3);
  CHECK(mesh.size() == 6);
  CHECK(mesh.group_ranks(0) == Ints{1, 4});
  CHECK(mesh.group_ranks(1) == Ints{3, 4, 5});
  CHECK(mesh.mesh_dim_name(1) == "tp");
  CHECK(mesh.device() == c10::Device(c10::kCPU));
  CHECK(mesh.to_string() == "{dp: 2, tp: 3} on cpu");
  CHECK(init_device_mesh("cpu", {6}, {}, World::fake(4, 6)).mesh_dim_name(0) == "0");
}

TEST_CASE("slices go through this rank, in the order of the names") {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, World::fake(5, 8));
  CHECK(mesh["tp"].mesh() == Mesh({2}, {"tp"}, {4, 5}));
  CHECK(mesh["tp"].local_rank(0) == 1);
  CHECK(mesh[{"tp", "pp"}].mesh() == Mesh({2, 2}, {"tp", "pp"}, {0, 4, 1, 5}));
  CHECK(mesh[{"tp", "pp"}].coordinate() == Ints{1, 1});
  CHECK(mesh[{"pp", "dp", "tp"}] == mesh);
}

TEST_CASE("merged mesh dimensions go through this rank, and are kept") {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, World::fake(5, 8));
  static_assert(!takes_double_braces<DeviceMesh>);  // it would be one string of two pointers
  const DeviceMesh merged = mesh.merged({1, 2});
  CHECK(mesh.merged(std::vector<std::string>{"dp", "tp"}) == merged);
  CHECK(merged.mesh() == Mesh({4}, {"dp+tp"}, {4, 5, 6, 7}));
  CHECK(merged.coordinate() == Ints{1});
  CHECK(merged.mesh_dim_name(0) == "dp+tp");
  CHECK(merged.group_ranks(0) == Ints{4, 5, 6, 7});
  CHECK(mesh.merged({1, 2}) == merged);
  CHECK(mesh.merged({-2, -1}) == merged);
  CHECK(mesh.merged({"dp", "tp"}) == merged);
  CHECK(mesh.merged({"tp"}) == mesh["tp"]);
  CHECK(mesh.merged({0}) == mesh["pp"]);
  CHECK(mesh.mesh().merged({"dp", "tp"}, {0, 0, 0}) == Mesh({4}, {"dp+tp"}));
  CHECK(mesh.merged({2, 1}).mesh() == Mesh({4}, {"tp+dp"}, {4, 6, 5, 7}));
  CHECK(mesh.merged({2, 1}).coordinate() == Ints{2});
  CHECK(mesh.merged({2}) == mesh["tp"]);
  CHECK(mesh["tp"].merged({0}) == mesh["tp"]);
  CHECK(mesh.merged({0, 1, 2}).mesh() == Mesh({8}, {"pp+dp+tp"}));
  check_refused([&] { mesh.merged({}); }, "no mesh dimensions of mesh {pp: 2, dp: 2, tp: 2} were given");
  check_refused(
      [&] {
        mesh.merged({1, 1});
      },
      "mesh dimension dp of mesh {pp: 2, dp: 2, tp: 2} appears twice in (1, 1)");
  check_refused([&] { mesh.merged({3}); }, "mesh dimension 3 is out of range");
}

TEST_CASE("a merged mesh lives as long as the mesh it was asked of") {
  const auto world = World::fake(0, 4);
  uint64_t id = 0;
  {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
    id = mesh.merged({0, 1}).id();
    CHECK(mesh.merged({0, 1}).id() == id);
  }
  CHECK(init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world).merged({0, 1}).id() > id);
}

TEST_CASE("threads that merge the same mesh dimensions at once get one mesh") {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {}, World::fake(3, 8));
  const std::vector<Ints> orders = {{0, 1}, {1, 0}, {1, 2}, {2, 1}, {0, 2}, {2, 0}, {0, 1, 2}, {2, 1, 0}};
  std::vector<std::vector<uint64_t>> ids(4);
  {
    std::vector<std::jthread> threads;
    for (std::vector<uint64_t>& seen : ids) {
      threads.emplace_back([&] {
        for (const Ints& order : orders) seen.push_back(mesh.merged(order).id());
      });
    }
  }
  for (const std::vector<uint64_t>& seen : ids) CHECK(seen == ids[0]);
  CHECK(std::set<uint64_t>(ids[0].begin(), ids[0].end()).size() == orders.size());
}

TEST_CASE("a rank outside has no coordinate, and gets the slice at coordinate 0") {
  const DeviceMesh mesh(World::fake(3, 4), c10::kCPU, Mesh({2}, {"tp"}, {0, 1}));
  CHECK_FALSE(mesh.is_member());
  CHECK(mesh.coordinate() == std::nullopt);
  CHECK(mesh["tp"].mesh() == mesh.mesh());
  CHECK(mesh.merged({0}) == mesh);
  CHECK(mesh.group_ranks(0) == Ints{0, 1});
  check_refused([&] { mesh.local_rank(0); }, "rank 3 is outside mesh {tp: 2} on cpu and has no coordinate");
  check_refused([&] { mesh.group(0); }, "rank 3 is outside mesh {tp: 2} on cpu and in none of its groups");
}

TEST_CASE("equal meshes have one id, different ones different ids, and none is used again") {
  const auto world = World::fake(0, 4);
  uint64_t gone = 0;
  {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
    gone = mesh.id();
    CHECK(init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world).id() == gone);
    CHECK(init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world) == mesh);
    CHECK_FALSE(init_device_mesh("cpu", {4}, {}, world) == mesh);
    CHECK_FALSE(init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, World::fake(0, 4)) == mesh);
    CHECK_FALSE(DeviceMesh(world, c10::kCPU, Mesh({2, 2}, {"dp", "tp"}, {0, 2, 1, 3})) == mesh);
  }
  for (int i = 0; i < 5; ++i) CHECK(init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world).id() > gone);
}

TEST_CASE("a device mesh is flattened, split and joined as its mesh is") {
  const auto world = World::fake(5, 8);
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, world);
  const DeviceMesh flat = mesh.flatten({"dp", "tp"}, "inner");
  CHECK(flat.mesh() == Mesh({2, 4}, {"pp", "inner"}));
  CHECK(flat.coordinate() == Ints{1, 1});
  CHECK(flat.group_ranks(1) == Ints{4, 5, 6, 7});
  CHECK(flat["inner"].mesh() == Mesh({4}, {"inner"}, {4, 5, 6, 7}));
  CHECK(mesh[{"dp", "tp"}].flatten({"dp", "tp"}) == mesh.merged({1, 2}));
  CHECK(flat.unflatten("inner", {2, 2}, {"dp", "tp"}) == mesh);
  CHECK(flat.unflatten(-1, {2, 2}, {"dp", "tp"}) == mesh);
  CHECK(mesh.concatenate({mesh["tp"], mesh["pp"]}) == mesh[{"tp", "pp"}]);
  CHECK(mesh.concatenate({mesh.merged({0, 1}), mesh["tp"]}) == mesh.flatten({0, 1}));
  CHECK(world->group_count() == 0);
  check_refused([&] { mesh.flatten({"dp", "cp"}); }, "has no mesh dimension 'cp'");
  check_refused([&] { mesh.unflatten("tp", {3}, {"x"}); }, "sizes (3) do not make mesh dimension tp");
  check_refused([&] { mesh.concatenate({mesh["tp"], mesh["tp"]}); }, "both extend along mesh dimension tp");
  const DeviceMesh foreign = init_device_mesh("cpu", {8}, {"tp"}, World::fake(5, 8));
  check_refused(
      [&] {
        mesh.concatenate({mesh["dp"], foreign});
      },
      "concatenate: {tp: 8} on cpu and {pp: 2, dp: 2, tp: 2} on cpu are of two worlds or two device types");
}

TEST_CASE("a mesh of 4096 ranks makes no group, nor do its slices; a group is made when it is asked for") {
  const auto world = World::fake(4095, 4096);
  const DeviceMesh mesh = init_device_mesh("cpu", {64, 8, 8}, {"dp", "pp", "tp"}, world);
  CHECK(mesh.coordinate() == Ints{63, 7, 7});
  CHECK(mesh["dp"].size() == 64);
  CHECK(mesh[{"pp", "tp"}].size() == 64);
  CHECK(mesh.merged({0, 2}).size() == 512);
  CHECK(mesh.flatten({0, 1, 2}).size() == 4096);
  CHECK(mesh.flatten({1, 2}).unflatten(1, {8, 8}, {"pp", "tp"}) == mesh);
  CHECK(world->group_count() == 0);
  CHECK(mesh.group("tp")->getSize() == 8);
  CHECK(world->group_count() == 1);
  CHECK(mesh["tp"].group(0) == mesh.group("tp"));
  CHECK(world->group_count() == 1);
}

TEST_CASE("options of a mesh dimension go with it, and make groups of their own") {
  using namespace std::chrono_literals;
  const auto world = World::fake(5, 8);
  const DeviceMesh plain = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, world);
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, world,
                                           {{"dp", {.timeout = 30s}}, {"tp", {.timeout = 30s}}});
  const GroupOptions slow = {.timeout = 30s}, none;
  CHECK(mesh.group_options(0) == none);
  CHECK(mesh.group_options(-1) == slow);
  CHECK_FALSE(mesh == plain);
  CHECK(mesh["pp"] == plain["pp"]);
  CHECK(mesh["tp"].group_options(0) == slow);
  CHECK(mesh[{"tp", "pp"}].group_options(1) == none);
  CHECK(mesh.merged({1, 2}).group_options(0) == slow);
  CHECK(mesh.merged({0, 2}).group_options(0) == none);
  CHECK(mesh.flatten({0, 1}, "x").group_options(0) == none);
  CHECK(mesh.flatten({0, 1}, "x").group_options(1) == slow);
  CHECK(mesh.flatten({1, 2}, "x").unflatten("x", {2, 2}, {"dp", "tp"}) == mesh);
  CHECK(mesh.concatenate({mesh["dp"], mesh["pp"]}).group_options(0) == slow);
  CHECK(mesh.concatenate({mesh["dp"], mesh["pp"]}).group_options(1) == none);
  CHECK(mesh.group("tp") != plain.group("tp"));
  CHECK(mesh.group("pp") == plain.group("pp"));
  // Options equal to the world's own make no difference.
  CHECK(init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, world, {{"tp", {.timeout = 5min, .backend = "gloo"}}}) ==
        plain);
  CHECK(init_device_mesh("cpu", {2, 4}, {}, world, {{"1", {.timeout = 30s}}}).group_options(1) == slow);
}

TEST_CASE("options that no mesh dimension can have are refused") {
  using namespace std::chrono_literals;
  const auto world = World::fake(0, 4);
  const auto with = [&](const MeshDimOptions& options) {
    return [=] { init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world, options); };
  };
  check_refused(with({{"pp", {}}}),
                "options for mesh dimension 'pp', which mesh {dp: 2, tp: 2} does not have; there are: dp, tp");
  check_refused(with({{"0", {}}}), "options for mesh dimension '0'");
  check_refused(
      [&] {
        init_device_mesh("cpu", {4}, {}, world, {{"1", {}}});
      },
      "options for mesh dimension '1', which mesh (4) does not have; there are: 0");
  check_refused(with({{"tp", {.timeout = 0ms}}}),
                "a timeout of 0 ms is not positive; leave it out for the world's 300000 ms");
  check_refused(with({{"tp", {.timeout = -5ms}}}), "a timeout of -5 ms is not positive");
  check_refused(with({{"tp", {.timeout = std::chrono::milliseconds::max()}}}),
                "ms is too long; give at most 1000000000");
  check_refused(with({{"tp", {.backend = "ucc"}}}), "there is no backend 'ucc' for tensors on cpu; use one of: gloo");
  check_refused(with({{"tp", {.backend = "nccl"}}}), "there is no backend 'nccl' for tensors on cpu");
  check_refused([&] { world->group({0, 1}, c10::kCPU, {.backend = "Gloo"}); }, "there is no backend 'Gloo'");
}

TEST_CASE("what is no mesh of this world is refused") {
  const auto world = World::fake(0, 4);
  check_refused([&] { init_device_mesh("cpu", {3}, {}, world); }, "shape (3) needs 3 ranks, the world has 4");
  check_refused([&] { init_device_mesh("cpu", {2, 2}, {"dp"}, world); }, "1 names (dp) for 2 mesh dimensions");
  check_refused([&] { init_device_mesh("tpu", {4}, {}, world); },
                "device 'tpu' is not supported; use \"cpu\" or \"cuda\"");
  check_refused(
      [&] {
        DeviceMesh(world, c10::kCPU, Mesh({2}, {}, {0, 4}));
      },
      "names rank 4, outside the world of 4 ranks");
  check_refused([&] { DeviceMesh(nullptr, c10::kCPU, Mesh({1})); }, "the world is null");
  check_refused([&] { DeviceMesh(world, c10::kMeta, Mesh({1})); }, "device type 'meta' is not supported");
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
  check_refused([&] { mesh["pp"]; }, "has no mesh dimension 'pp'; there are: dp, tp");
  check_refused([&] { mesh.size("pp"); }, "has no mesh dimension 'pp'");
  check_refused([&] { mesh.group("pp"); }, "has no mesh dimension 'pp'");
  check_refused([&] { mesh.group_ranks(2); }, "mesh dimension 2 is out of range");
}

TEST_CASE("a mesh on cuda where there is none says so, and what to do") {
  const auto worlds = make_in_process_worlds(4);
  check_refused<std::runtime_error>([&] { init_device_mesh("cuda", {4}, {}, worlds[2]); },
                                    "a mesh on cuda was asked for, and rank 2 has no CUDA device");
  CHECK(init_device_mesh("cuda", {4}, {}, World::fake(2, 4)).device() == c10::Device("cuda:0"));
}

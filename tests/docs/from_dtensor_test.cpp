// Holds the code of docs/coming-from-dtensor.md on meshes and tensors: the case of a name of PyTorch's holds the code
// of its row, and docs_test compares them. Ranks are threads, except where a row reads the environment.

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/docs/from_dtensor.h"
#include "tessera/tests/harness/ranks.h"

namespace {

using namespace from_dtensor;

using Names = std::vector<std::string>;
using Sizes = std::vector<int64_t>;

const tessera::Placements placements = {S0, R};

at::Tensor spread(const tessera::DeviceMesh& mesh) { return tessera::distribute_tensor(numbers(), mesh, placements); }
bool is_whole(const at::Tensor& t, const at::Tensor& want) { return at::equal(tessera::full_tensor(t), want); }

}  // namespace

// ---- torch.distributed

TESSERA_RANKS_TEST_CASE("get_rank", {2}) {
  const auto world = tessera::World::from_environment();
  CHECK(world->rank() == tessera::testing::rank());
}

TESSERA_RANKS_TEST_CASE("get_world_size", {2}) {
  const auto world = tessera::World::from_environment();
  const int64_t tp = 2;
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {world->size() / tp, tp}, {"dp", "tp"}, world);
  CHECK(mesh.mesh().shape() == Sizes{1, 2});
}

TEST_CASE("barrier") {
  std::atomic<int> arrived = 0;
  on_mesh([&](const tessera::DeviceMesh& mesh) {
    ++arrived;
    tessera::barrier(mesh.merged({0, 1}), 0);
    CHECK(arrived == 4);
  });
}

TEST_CASE("all_reduce") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor x = at::ones({3});
    CHECK(at::equal(tessera::all_reduce(x, mesh, 1, tessera::ReduceOp::kSum), x * 2));
  });
}

TEST_CASE("broadcast") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor x = at::full({3}, mesh.local_rank("tp"));
    CHECK(at::equal(tessera::broadcast(x, mesh, 1, 0), at::zeros({3}, at::kLong)));
  });
}

// ---- torch.distributed.device_mesh

TESSERA_RANKS_TEST_CASE("init_device_mesh", {4}) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
  CHECK(mesh.mesh() == tessera::Mesh({2, 2}, {"dp", "tp"}));
}

TEST_CASE("DeviceMesh") {
  on_mesh([](const tessera::DeviceMesh& like) {
    const auto world = like.world_ptr();
    const auto mesh = tessera::DeviceMesh(world, at::kCPU, tessera::Mesh({2, 2}, {"dp", "tp"}, {0, 2, 1, 3}));
    CHECK(mesh.group_ranks(0) == (world->rank() < 2 ? Sizes{0, 1} : Sizes{2, 3}));
  });
}

TEST_CASE("DeviceMesh.device_type") {
  on_mesh([](const tessera::DeviceMesh& mesh) { CHECK((mesh.device_type() == at::kCPU)); });
}

TEST_CASE("DeviceMesh.mesh") {
  on_mesh([](const tessera::DeviceMesh& mesh) { CHECK(mesh.mesh().ranks() == Sizes{0, 1, 2, 3}); });
}

TEST_CASE("DeviceMesh.mesh_dim_names") {
  on_mesh([](const tessera::DeviceMesh& mesh) { CHECK(mesh.mesh().names() == Names{"dp", "tp"}); });
}

TEST_CASE("DeviceMesh.get_group") {
  on_mesh([](const tessera::DeviceMesh& mesh) { CHECK(mesh.group("tp")->getSize() == 2); });
}

TEST_CASE("DeviceMesh.get_all_groups") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const std::vector<c10::intrusive_ptr<c10d::Backend>> groups = {mesh.group(0), mesh.group(1)};
    CHECK(groups[0] == mesh.group("dp"));
    CHECK(groups[1] == mesh.group("tp"));
  });
}

TESSERA_RANKS_TEST_CASE("DeviceMesh.from_group", {4}) {
  const tessera::DeviceMesh made = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
  const auto dp_group = made.group("dp"), tp_group = made.group("tp");
  const auto mesh = tessera::DeviceMesh::from_group({dp_group, tp_group}, "cpu", tessera::Mesh({2, 2}, {"dp", "tp"}));
  CHECK(mesh.group("tp") == tp_group);
}

TEST_CASE("DeviceMesh.size") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    CHECK(mesh.size() == 4);
    CHECK(mesh.size("tp") == 2);
  });
}

TEST_CASE("DeviceMesh.ndim") {
  on_mesh([](const tessera::DeviceMesh& mesh) { CHECK(mesh.ndim() == 2); });
}

TEST_CASE("DeviceMesh.shape") {
  on_mesh([](const tessera::DeviceMesh& mesh) { CHECK(mesh.mesh().shape() == Sizes{2, 2}); });
}

TEST_CASE("DeviceMesh.get_rank") {
  tessera::run_in_process(2, [](const std::shared_ptr<tessera::World>& world) {
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2}, {}, world);
    CHECK(mesh.world().rank() == world->rank());
  });
}

TEST_CASE("DeviceMesh.get_local_rank") {
  on_mesh([](const tessera::DeviceMesh& mesh) { CHECK(mesh.local_rank("tp") == mesh.world().rank() % 2); });
}

TEST_CASE("DeviceMesh.get_coordinate") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const int64_t rank = mesh.world().rank();
    CHECK(mesh.coordinate() == std::optional<Sizes>({rank / 2, rank % 2}));
  });
}

// ---- torch.distributed.tensor

TEST_CASE("DTensor") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = spread(mesh);
    CHECK(tessera::is_dtensor(t));
    CHECK(tessera::DTensor(t).placements() == placements);
  });
}

TEST_CASE("DTensor.from_local") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor piece = at::full({mesh.local_rank("dp") == 0 ? 2 : 1, 6}, 1.0);
    const at::Tensor t = tessera::from_local(piece, mesh, {S0, R}, {.shape = {{3, 6}}, .check = true});
    CHECK(is_whole(t, at::ones({3, 6})));
    const at::Tensor even = tessera::from_local(at::ones({2, 6}), mesh, {S0, R});
    CHECK(even.size(0) == 4);
  });
}

TEST_CASE("DTensor.to_local") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = spread(mesh);
    CHECK(at::equal(tessera::to_local(t), numbers().chunk(2)[static_cast<std::size_t>(mesh.local_rank("dp"))]));
  });
}

TEST_CASE("DTensor.redistribute") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = spread(mesh);
    const at::Tensor moved = tessera::redistribute(t, {R, S1}, {.forward_dtype = at::kBFloat16, .async = true});
    CHECK(is_whole(moved, numbers().to(at::kBFloat16)));
    const at::Tensor there = tessera::redistribute_to(t, mesh.merged({0, 1}), {S0});
    CHECK(is_whole(there, numbers()));
  });
}

TEST_CASE("DTensor.full_tensor") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = spread(mesh);
    CHECK(at::equal(tessera::full_tensor(t), numbers()));
  });
}

TEST_CASE("DTensor.device_mesh") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = spread(mesh);
    CHECK(tessera::mesh_of(t) == mesh);
  });
}

TEST_CASE("DTensor.placements") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = spread(mesh);
    CHECK(tessera::placements_of(t) == placements);
  });
}

TEST_CASE("distribute_tensor") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor x = numbers() * static_cast<double>(mesh.world().rank() + 1);
    CHECK(is_whole(tessera::distribute_tensor(x, mesh, {S0, R}), numbers()));
    const at::Tensor own = tessera::distribute_tensor(numbers(), mesh, {S0, R}, tessera::kNoSource);
    CHECK(is_whole(own, numbers()));
  });
}

TEST_CASE("Shard") {
  CHECK(tessera::to_string(tessera::Shard(0)) == "S(0)");
  CHECK(tessera::Shard(0).tensor_dim() == 0);
}

TEST_CASE("Replicate") { CHECK(tessera::to_string(tessera::Replicate()) == "R"); }

TEST_CASE("Partial") {
  CHECK(tessera::to_string(tessera::Partial()) == "P(sum)");
  CHECK(tessera::to_string(tessera::Partial(tessera::ReduceOp::kAvg)) == "P(avg)");
}

TEST_CASE("Placement") {
  const tessera::Placement placement = tessera::Shard(0);
  CHECK(placement.is_shard(0));
  CHECK_FALSE(placement.is_replicate());
  CHECK_FALSE(placement.is_partial());
}

TEST_CASE("ones") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::ones({4, 6}, mesh, placements, at::kDouble).requires_grad_();
    CHECK(is_whole(t.detach(), at::ones({4, 6}, at::kDouble)));
    CHECK(t.requires_grad());
  });
}

TEST_CASE("empty") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    CHECK(tessera::to_local(tessera::empty({4, 6}, mesh, placements)).sizes() == at::IntArrayRef({2, 6}));
  });
}

TEST_CASE("full") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    CHECK(is_whole(tessera::full({4, 6}, 3.5, mesh, placements), at::full({4, 6}, 3.5)));
  });
}

TEST_CASE("rand") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    tessera::manual_seed(1, mesh.world());
    const at::Tensor cut = tessera::full_tensor(tessera::rand({4, 6}, mesh, placements));
    tessera::manual_seed(1, mesh.world());
    CHECK(is_whole(tessera::rand({4, 6}, mesh, {R, S1}), cut));
    CHECK((cut.min().item<double>() >= 0 && cut.max().item<double>() < 1));
  });
}

TEST_CASE("randn") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::full_tensor(tessera::randn({4, 6}, mesh, placements));
    CHECK((t.min().item<double>() < 0 && t.max().item<double>() > 0));
  });
}

TEST_CASE("zeros") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    CHECK(is_whole(tessera::zeros({4, 6}, mesh, placements), at::zeros({4, 6})));
  });
}

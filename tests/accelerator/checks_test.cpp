// Tests that checks of values are left to the device, which finds what is wrong, and that the host does not wait for
// it.

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <doctest/doctest.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/sharded_embedding.h"
#include "tessera/mesh/device_type.h"
#include "tessera/mesh/in_process.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"
#include "tessera/placement/partition.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/accelerator/late_stream.h"
#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr int64_t kRows = 6;  // of tables, and classes

at::Tensor late(const at::Tensor& t) { return t.to(device()); }

at::Tensor spread(const at::Tensor& whole, const DeviceMesh& mesh, const Placement& placement) {
  return distribute_tensor(late(whole), mesh, {placement}, kNoSource);
}

// Returns this rank's rows of [kRows, 4].
at::Tensor my_rows(const DeviceMesh& mesh) {
  const Interval mine = chunk_range(kRows, mesh.size(), mesh.local_rank(0));
  return late(at::arange(kRows * 4, at::kFloat).view({kRows, 4}).slice(0, mine.begin, mine.end));
}

struct Check {
  std::string name;
  std::string text;  // of the error
  std::function<void(bool bad, const DeviceMesh& mesh)> call;
};

const std::vector<Check>& checks() {
  const auto ids = [](bool bad) { return late(at::tensor({1, 0, bad ? 6 : 5, 3}, at::kLong)); };
  static const std::vector<Check> all = {
      {"a plain part of a table", "an index is outside the table's rows",
       [ids](bool bad, const DeviceMesh& mesh) {
         sharded_embedding(ids(bad), my_rows(mesh), mesh, {.num_embeddings = kRows});
       }},
      {"columns of a table", "an id is outside the table's rows",
       [ids](bool bad, const DeviceMesh& mesh) {
         const at::Tensor columns = late(at::ones({kRows, 2}));
         sharded_embedding(ids(bad), columns, mesh,
                           {.cut = EmbeddingCut::kWidth, .num_embeddings = kRows, .embedding_dim = 2 * mesh.size()});
       }},
      {"a DTensor as table", "an index is outside the table's rows",
       [ids](bool bad, const DeviceMesh& mesh) {
         const at::Tensor table = spread(at::ones({kRows, 4}), mesh, Shard(0));
         at::embedding(table, from_local(ids(bad), mesh, {Replicate()}));
       }},
      {"cross entropy of cut classes", "a target is out of the classes' bounds",
       [ids](bool bad, const DeviceMesh& mesh) {
         sharded_cross_entropy(late(at::ones({4, kRows})), ids(false) + (bad ? kRows * mesh.size() : 0), mesh);
       }},
      {"cross entropy of a DTensor", "a target is out of the classes' bounds",
       [ids](bool bad, const DeviceMesh& mesh) {
         const at::Tensor logits = spread(at::ones({4, kRows}), mesh, Shard(1));
         at::cross_entropy_loss(logits, from_local(ids(bad), mesh, {Replicate()}));
       }},
      {"elements of a cut dimension", "gather: an index is outside dimension 0",
       [ids](bool bad, const DeviceMesh& mesh) {
         const at::Tensor x = spread(at::ones({kRows, 4}), mesh, Shard(0));
         x.gather(0, from_local(ids(bad).narrow(0, 2, 1).view({1, 1}), mesh, {Replicate()}));
       }},
      {"one_hot", "a class is outside [0, num_classes)",
       [ids](bool bad, const DeviceMesh& mesh) { at::one_hot(from_local(ids(bad), mesh, {Replicate()}), kRows); }},
      {"a pending norm", "a value with negative elements cannot be a pending norm",
       [](bool bad, const DeviceMesh& mesh) {
         const at::Tensor value = late(at::tensor({3.0, bad ? -1.0 : 2.0}));
         redistribute(from_local(value, mesh, {Replicate()}), {NormPartial(2)});
       }},
  };
  return all;
}

void drain() { c10::impl::VirtualGuardImpl(device().type()).synchronizeDevice(0); }

}  // namespace

TESSERA_RANKS_TEST_CASE("a wrong value is found by the device, and the host does not wait for that", {1, 2}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (const Check& check : checks()) {
    CAPTURE(check.name);
    if (check.name == "a pending norm" && mesh.size() == 1) continue;  // nothing is pending on one rank
    CHECK_NOTHROW(check.call(false, mesh));
    CHECK_NOTHROW(current_late_stream(mesh.device()).drain());
    CHECK_NOTHROW(check.call(true, mesh));
    CHECK_THROWS_WITH(current_late_stream(mesh.device()).drain(), doctest::Contains(check.text.c_str()));
  }
}

TESSERA_RANKS_TEST_CASE("the host does not wait for the device in any of these", {1}) {
  const DeviceMesh mesh = tp_line();
  for (const Check& check : checks()) {
    CAPTURE(check.name);
    if (check.name == "a pending norm") continue;  // nothing is pending on one rank
    drain();
    // A call that waited for the stream once would take this long.
    constexpr std::chrono::milliseconds kLeast(1500);
    const OwnStream stream(0, kLeast);
    const auto begin = std::chrono::steady_clock::now();
    check.call(false, mesh);
    CHECK(std::chrono::steady_clock::now() - begin < kLeast);
    current_late_stream(mesh.device()).take_at_least({});
  }
  drain();
}

TEST_CASE("a rank's device is the given one, the only one, or that of its place on the host") {
  CHECK(device_index_of(kAccelerator, 5, 1, std::nullopt) == 1);
  CHECK(device_index_of(kAccelerator, 5, 0, 1) == 1);
  const auto refused = [](int64_t local_rank, std::optional<int> given, const char* text) {
    CHECK_THROWS_WITH_AS(device_index_of(kAccelerator, 5, local_rank, given), doctest::Contains(text),
                         std::runtime_error);
  };
  refused(2, std::nullopt, "rank 5 is process 2 of its host, counted from 0, and sees 2");
  refused(0, kDevices, "rank 5 was given LATE device 2, and there are 2, counted from 0");
  refused(0, -1, "was given LATE device -1");
  WorldOptions options;
  options.device_index = 1;
  const c10::impl::VirtualGuardImpl guard(kAccelerator);
  const DeviceMesh mesh = init_device_mesh(device_name(), {1}, {"tp"}, World::create(std::move(options)));
  CHECK(mesh.device() == c10::Device(kAccelerator, 1));
  CHECK(guard.getDevice() == mesh.device());
  guard.setDevice(c10::Device(kAccelerator, 0));
}

TEST_CASE("ranks that are threads all use the device that was given") {
  run_in_process(2,
                 [](const std::shared_ptr<World>& world) {
                   const DeviceMesh mesh = init_device_mesh(device_name(), {2}, {"tp"}, world);
                   CHECK(mesh.device() == c10::Device(kAccelerator, 1));
                   const at::Tensor ones = at::ones({3}, at::TensorOptions(mesh.device()));
                   CHECK(same_values(all_reduce(ones, mesh, 0, ReduceOp::kSum), at::full({3}, 2.0)));
                 },
                 {.device_index = 1});
}

TESSERA_RANKS_TEST_CASE("parallelize_module brings a module to the mesh's device, which it does not leave any more",
                        {1, 2}) {
  struct Two : torch::nn::Module {
    Two() : weight(register_parameter("weight", at::ones({4, 3}))), rest(register_buffer("rest", at::ones({2}))) {}
    at::Tensor weight, rest;
  };
  const DeviceMesh mesh = tp_line();
  const auto module = std::make_shared<Two>();
  parallelize_module(module, mesh, {});
  const at::Tensor weight = module->parameters()[0], rest = module->buffers()[0];
  REQUIRE(is_dtensor(weight));
  for (const c10::Device other : {c10::Device(at::kCPU), c10::Device(kAccelerator, 1)}) {
    CAPTURE(other.str());
    CHECK_THROWS_WITH_AS(module->to(other), doctest::Contains("redistribute_to(x, mesh)"), std::invalid_argument);
    CHECK(module->parameters()[0].device() == mesh.device());
    CHECK(module->buffers()[0].device() == mesh.device());
    CHECK(to_local(module->parameters()[0].detach()).device() == mesh.device());
  }
  module->to(mesh.device());
  CHECK(module->parameters()[0].is_same(weight));
  module->to(at::kDouble);
  CHECK((module->parameters()[0].scalar_type() == at::kDouble));
  CHECK(module->parameters()[0].device() == mesh.device());
}

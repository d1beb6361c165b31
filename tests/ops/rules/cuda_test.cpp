// Tests what rules and the dispatcher decide for CUDA tensors where there is no GPU: the pieces have a device, sizes
// and a dtype, and no memory. What is expected is what LibTorch's kernels for CUDA return.

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/mesh/backends/nccl_group.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/ops/rules/rule.h"
#include "tessera/tests/harness/skip.h"

using namespace tessera;

namespace {

const c10::Device kGpu(at::kCUDA, 0);

at::Tensor without_memory(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, kGpu), nullptr, /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(none), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                   c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

DeviceMesh mesh_of_four(const char* device) {
  static const std::shared_ptr<World> world = World::fake(0, 4);
  return init_device_mesh(device, {4}, {"tp"}, world);
}

at::Tensor spread(at::IntArrayRef piece, const Placement& placement, at::ScalarType dtype = at::kFloat) {
  return from_local(without_memory(piece, dtype), mesh_of_four("cuda"), {placement});
}

// Returns the rule of an operator for these arguments on that type of device.
rules::OpRule rule_of(const char* name, const char* overload, const std::vector<c10::IValue>& args,
                      c10::DeviceType device) {
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  rules::OpCall call{
      .schema = op.schema(), .args = args, .inputs = {}, .outputs = {}, .first_input = {}, .device = device};
  for (const c10::IValue& arg : args) {
    call.first_input.push_back(call.inputs.size());
    if (!arg.isTensor() && !arg.isNone()) continue;
    const at::Tensor t = arg.isTensor() ? arg.toTensor() : at::Tensor();
    if (t.defined()) {
      call.inputs.push_back({.sizes = t.sizes().vec(), .dtype = t.scalar_type()});
    } else {
      call.inputs.push_back({.sizes = {}, .dtype = at::kFloat, .defined = false});
    }
  }
  return rules::find_rule(rules::rule_key(op.schema().name()))(call);
}

bool has_partial(const rules::OpRule& rule) {
  return std::ranges::any_of(rule.strategies, [](const rules::Strategy& each) { return each.outputs[0].is_partial(); });
}

}  // namespace

TEST_CASE("layer norm of half numbers has statistics in float32 on a GPU, and in half on the CPU") {
  const std::vector<int64_t> normalized = {6};
  for (const at::ScalarType half : {at::kHalf, at::kBFloat16}) {
    const auto statistics = [&](const at::Tensor& x, const at::Tensor& weight, c10::DeviceType device) {
      const rules::OpRule rule = rule_of("aten::native_layer_norm", "", {x, normalized, weight, weight, 1e-5}, device);
      return std::string(c10::toString(rule.outputs.at(1).dtype));
    };
    CHECK(statistics(without_memory({8, 6}, half), without_memory({6}, half), at::kCUDA) == "Float");
    CHECK(statistics(at::empty({8, 6}, half), at::empty({6}, half), at::kCPU) == c10::toString(half));
  }
}

TEST_CASE(
    "batch norm with given statistics returns buffers of one number per channel on a GPU, and empty ones on the CPU") {
  const auto rule = [](const at::Tensor& x, const at::Tensor& channels, c10::DeviceType device) {
    return rule_of("aten::native_batch_norm", "", {x, channels, channels, channels, channels, false, 0.1, 1e-5},
                   device);
  };
  const rules::OpRule gpu = rule(without_memory({8, 5, 3}), without_memory({5}), at::kCUDA);
  CHECK(gpu.outputs.at(1).sizes == std::vector<int64_t>{5});
  const rules::OpRule cpu = rule(at::empty({8, 5, 3}), at::empty({5}), at::kCPU);
  CHECK(cpu.outputs.at(1).sizes == std::vector<int64_t>{0});
  // Where the channels are cut, so are a GPU's buffers.
  const auto cut = [](const rules::Strategy& each) { return each.outputs[0] == Shard(1); };
  const auto found = std::ranges::find_if(gpu.strategies, cut);
  REQUIRE(found != gpu.strategies.end());
  CHECK(found->outputs == std::vector<Placement>{Shard(1), Shard(0), Shard(0)});
}

TEST_CASE("the buffer of log_sigmoid is empty on a GPU") {
  const rules::OpRule gpu = rule_of("aten::log_sigmoid_forward", "", {without_memory({8, 5})}, at::kCUDA);
  CHECK(gpu.outputs.at(1).sizes == std::vector<int64_t>{0});
  CHECK(rule_of("aten::log_sigmoid_forward", "", {at::empty({8, 5})}, at::kCPU).outputs.at(1).sizes ==
        std::vector<int64_t>{8, 5});
  const at::Tensor x = spread({8, 5}, Shard(0)), buffer = spread({0}, Replicate());
  const OpExplanation forward = explain_op("aten::log_sigmoid_forward", {x});
  CHECK(forward.outputs == std::vector<Placements>{{Shard(0)}, {Replicate()}});
  const OpExplanation backward = explain_op("aten::log_sigmoid_backward", {x, x, buffer});
  CHECK(backward.by_rule);
  CHECK(backward.outputs == std::vector<Placements>{{Shard(0)}});
  CHECK(backward.steps.empty());
}

TEST_CASE("what replaces elements keeps pending terms on the CPU alone, since a GPU writes in any order") {
  const auto replaces = [](const at::Tensor& self, const at::Tensor& index, c10::DeviceType device) {
    return has_partial(rule_of("aten::scatter", "src", {self, 0, index, self}, device));
  };
  CHECK(replaces(at::empty({8, 5}), at::empty({8, 5}, at::kLong), at::kCPU));
  CHECK_FALSE(replaces(without_memory({8, 5}), without_memory({8, 5}, at::kLong), at::kCUDA));
}

TEST_CASE("index_copy, whose threads write in any order, keeps no pending terms") {
  const at::Tensor self = at::empty({8, 5}), index = at::empty({8}, at::kLong);
  CHECK_FALSE(has_partial(rule_of("aten::index_copy", "", {self, 0, index, self}, at::kCPU)));
}

TEST_CASE("a product with a bias of the factors' dtype has the dtype that is asked for") {
  const auto half = [](at::IntArrayRef sizes) { return without_memory(sizes, at::kHalf); };
  const rules::OpRule rule =
      rule_of("aten::addmm", "dtype", {half({4}), half({3, 5}), half({5, 4}), at::kFloat, 1, 1}, at::kCUDA);
  CHECK((rule.outputs.at(0).dtype == at::kFloat));
}

TEST_CASE("a DTensor on a GPU obeys autocast for CUDA, and its redistribution is planned for NVLink") {
  const at::Tensor gpu = spread({8, 5}, Shard(0));
  CHECK(gpu.is_cuda());
  CHECK(gpu.key_set().has(c10::DispatchKey::AutocastCUDA));
  CHECK_FALSE(gpu.key_set().has(c10::DispatchKey::AutocastCPU));
  const at::Tensor cpu = from_local(at::empty({8, 5}), mesh_of_four("cpu"), {Shard(0)});
  CHECK(cpu.key_set().has(c10::DispatchKey::AutocastCPU));
  const CostModel there = default_cost_model(mesh_of_four("cuda")), here = default_cost_model(mesh_of_four("cpu"));
  CHECK(there.links[0].bytes_per_microsecond > here.links[0].bytes_per_microsecond);
}

TEST_CASE("a DTensor on a GPU refuses to leave its mesh, and says how to") {
  const at::Tensor x = spread({8, 5}, Shard(0));
  for (const c10::Device other : {c10::Device(at::kCPU), c10::Device(at::kCUDA, 1)}) {
    CAPTURE(other.str());
    CHECK_THROWS_WITH_AS(x.to(other), doctest::Contains("redistribute_to(x, mesh)"), std::invalid_argument);
    CHECK_THROWS_WITH_AS(x.to(other), doctest::Contains("full_tensor(x)"), std::invalid_argument);
  }
  CHECK(x.to(kGpu).is_same(x));
}

TEST_CASE("a plain tensor of the host is refused beside a GPU's DTensor, unless it holds indices") {
  const at::Tensor x = spread({8, 5}, Shard(0));
  const ImplicitReplication replicated;
  for (const char* part :
       {"aten::add: a plain tensor [5] on cpu among DTensors on cuda", "bring it there by .to(\"cuda"}) {
    CHECK_THROWS_WITH_AS(at::add(x, at::ones({5})), doctest::Contains(part), std::invalid_argument);
  }
  const c10::List<std::optional<at::Tensor>> places({at::zeros({3}, at::kLong)});
  CHECK_NOTHROW(explain_op("aten::index.Tensor", {x, places}));
  CHECK_NOTHROW(explain_op("aten::copy_", {x, at::ones({5})}));
}

TEST_CASE("an LSTM on a GPU runs on the pieces where the batch alone is cut") {
  if (built_with_nccl()) TESSERA_SKIP("this build has LibTorch's kernels for CUDA, which would need memory");
  static thread_local int modules = 0;
  const auto count = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    modules += std::string(function.name()) == "aten::lstm" ? 1 : 0;
    return nullptr;
  };
  std::vector<at::Tensor> weights;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{16, 3}, {16, 4}, {16}, {16}}) {
    weights.push_back(spread(sizes, Replicate()));
  }
  // Returns how many calls of the module there are: the caller's, and one on the pieces. Here LibTorch has no kernels
  // for CUDA, so both end with an error.
  const auto calls = [&](const at::Tensor& x, const at::Tensor& state) {
    modules = 0;
    const at::CallbackHandle handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
    CHECK_THROWS_AS(at::lstm(x, {state, state}, weights, true, 1, 0.0, false, false, false), c10::NotImplementedError);
    at::removeCallback(handle);
    return modules;
  };
  CHECK(calls(spread({7, 2, 3}, Shard(1)), spread({1, 2, 4}, Shard(1))) == 2);
  CHECK(calls(spread({7, 8, 3}, Replicate()), spread({1, 8, 1}, Shard(2))) == 1);
}

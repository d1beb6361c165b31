// Checks by the order of events, not by time, that the input's gradient is reduced while the weight's gradient is
// computed.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/randn.h>
#include <ATen/record_function.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/sharded_linear.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/delayed_group.h"
#include "tessera/tests/harness/device.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

// Lists what this rank's thread does, in order: collectives, and matrix products under their operator's name.
thread_local std::vector<std::string>* events = nullptr;

void note(const std::string& text) {
  if (events != nullptr) events->push_back(text);
}

// Records the products of this thread when they are finished.
class ProductsNoted {
 public:
  ProductsNoted()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(nullptr, finished).scopes({at::RecordScope::FUNCTION}))) {}
  ~ProductsNoted() { at::removeCallback(handle_); }

 private:
  static void finished(const at::RecordFunction& function, at::ObserverContext*) {
    if (std::string(function.name()) == "aten::mm") note("product");
  }
  const at::CallbackHandle handle_;
};

using Forward = std::function<at::Tensor(const DeviceMesh& mesh)>;

// Returns the events of rank 0 in backward.
std::vector<std::string> backward_events(const Forward& forward) {
  std::vector<std::string> out;
  run_delayed(2, {.on_event = note}, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2}, {"tp"}, world);
    forward(mesh).backward();  // an operator's first call also runs it on meta tensors, for its result's sizes
    const at::Tensor y = forward(mesh);
    std::vector<std::string> here;
    events = &here;
    {
      const ProductsNoted products;
      y.backward();
    }
    events = nullptr;
    if (world->rank() == 0) out = here;
  });
  return out;
}

Forward by_function(const ShardedLinearOptions& options) {
  return [options](const DeviceMesh& mesh) {
    const at::Tensor x = at::randn({4, 6}, on(at::kFloat)).requires_grad_(),
                     weight = at::randn({8, 6}, on(at::kFloat)).requires_grad_();
    return sharded_linear(x, weight, {}, mesh, options).sum();
  };
}

// The linear layer's input is the result of another operator.
Forward by_style(const ColwiseParallel& style, const Placement& input) {
  return [style, input](const DeviceMesh& mesh) {
    torch::nn::Linear layer(6, 8);
    layer->to(device());
    auto tp = parallelize_module(layer, mesh, style, {.src_rank = kNoSource});
    const at::Tensor x =
        distribute_tensor(at::randn({4, 2, 6}, on(at::kFloat)), mesh, {input}, kNoSource).requires_grad_();
    return to_local(tp(x.exp())).sum();
  };
}

std::size_t last_place_of(const std::vector<std::string>& all, const std::string& event) {
  return static_cast<std::size_t>(all.rend() - std::find(all.rbegin(), all.rend(), event)) - 1;
}

}  // namespace

TEST_CASE("the input's gradient is all-reduced while the weight's is computed") {
  const std::vector<std::string> all = backward_events(by_function({.reduce_input_gradient = true}));
  CAPTURE(all);
  // The input's gradient is computed, then reduced while the weight's is computed.
  CHECK(all == std::vector<std::string>{"product", "all_reduce begins", "product", "all_reduce came"});
}

TEST_CASE("under a style, the input's gradient is reduced while the weight's is computed") {
  const std::vector<std::string> all = backward_events(by_style(ColwiseParallel(), Replicate()));
  CAPTURE(all);
  REQUIRE(all.size() == 4);
  CHECK(all[0] == "product");
  CHECK(all[1].ends_with(" begins"));
  CHECK(all[2] == "product");
  CHECK(all[3].ends_with(" came"));
}

TEST_CASE(
    "in sequence parallel the input is gathered while its gradient is computed, which travels while the weight's is") {
  for (const bool style : {false, true}) {
    CAPTURE(style);
    const std::vector<std::string> all =
        backward_events(style ? by_style(ColwiseParallel({.gather_input_again = true}), Shard(0))
                              : by_function({.sequence_parallel = true}));
    CAPTURE(all);
    REQUIRE(all.size() == 6);
    const auto second = all.begin() + static_cast<std::ptrdiff_t>(last_place_of(all, "product"));
    // The first begins before the input's gradient, the other after it; the gathered input is complete for the
    // weight's.
    CHECK(all[0].ends_with(" begins"));
    CHECK(all[1] == "product");
    CHECK(std::count_if(all.begin(), second, [](const std::string& event) { return event.ends_with(" begins"); }) == 2);
    CHECK(std::count_if(all.begin(), second, [](const std::string& event) { return event.ends_with(" came"); }) == 1);
    CHECK(second == all.end() - 2);
    CHECK(all.back().ends_with(" came"));
  }
}

// Tests that a tensor at an address that another tensor had before gets nothing of it, such as an optimizer's state,
// and that a tensor in an optimizer keeps its address.

#include <set>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/optim/adamw.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/world.h"

using namespace tessera;

namespace {

DeviceMesh fake_line() { return init_device_mesh("cpu", {2}, {"tp"}, World::fake(0, 2)); }

at::Tensor leaf(const DeviceMesh& mesh) { return from_local(at::ones({2, 3}), mesh, {Shard(0)}).requires_grad_(); }

void step(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  parameter.mutable_grad() = at::ones_like(parameter);
  optimizer.step();
}

}  // namespace

// AddressSanitizer asks for this: it would keep freed memory, so that no address is used again.
// NOLINTNEXTLINE(bugprone-reserved-identifier)
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=0:thread_local_quarantine_size_kb=0"; }

TEST_CASE("while an optimizer lives no other tensor gets the address of one of its parameters") {
  const DeviceMesh mesh = fake_line();
  auto optimizer = [&] {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 10; ++i) parameters.push_back(leaf(mesh));
    torch::optim::AdamW made(parameters, torch::optim::AdamWOptions(0.1));
    for (const at::Tensor& parameter : parameters) step(made, parameter);
    return made;
  }();
  std::vector<at::Tensor> later;
  for (int i = 0; i < 200; ++i) {
    later.push_back(leaf(mesh));
    CHECK(optimizer.state().count(later.back().unsafeGetTensorImpl()) == 0);
  }
}

TEST_CASE("a tensor at an address that another had before has nothing of it") {
  const DeviceMesh mesh = fake_line();
  std::set<const void*> addresses;
  bool again = false;
  int calls = 0;
  for (int i = 0; i < 200; ++i) {
    const at::Tensor piece = at::ones({2, 3});
    const at::Tensor t = from_local(piece, mesh, {Shard(0)});
    again |= !addresses.insert(t.unsafeGetTensorImpl()).second;
    CHECK_FALSE(t.requires_grad());
    CHECK(t.is_leaf());
    CHECK_FALSE(t.grad().defined());
    CHECK(t._version() == piece._version());
    const at::Tensor twice = t * 2;
    CHECK(twice._version() == 0);
    CHECK(to_local(t).eq(1).all().item<bool>());
    t.add_(1);
    t.requires_grad_();
    t.register_hook([&](const at::Tensor&) { ++calls; });
    (t * 2).sum().backward();
    CHECK(calls == i + 1);
  }
  CHECK(again);
}

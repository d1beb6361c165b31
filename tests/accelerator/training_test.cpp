// Tests redistribution, and forward, backward and training of modules, of ranks that are threads on streams of their
// own whose work is done late.

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <doctest/doctest.h>
#include <torch/optim.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/stream_point.h"
#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::vector<Placement> kPlacements = {Replicate(), Shard(0), Shard(1), Partial()};

at::Tensor to_cpu(const at::Tensor& t) { return t.detach().cpu(); }

// Returns the value as a DTensor whose piece is computed late. A sum's terms are the value on rank 0, and zeros.
at::Tensor late_spread(double first, int64_t rows, int64_t columns, const DeviceMesh& mesh,
                       const Placement& placement) {
  const at::Tensor whole = late_numbers(first, rows, columns);
  if (!placement.is_partial()) return distribute_tensor(whole, mesh, {placement}, 0);
  return from_local(rank() == 0 ? whole : whole * 0, mesh, {placement});
}

// Returns the largest difference of the values, on the CPU.
double worst(const at::Tensor& got, const at::Tensor& want) {
  return (to_cpu(got) - to_cpu(want)).abs().max().item<double>();
}

constexpr double kTolerance = 1e-12;  // float64, where only sums are reordered

// The weights and biases of two linear layers, 8 to 12 to 5, and how they are cut: the first by its outputs, the second
// by its inputs. LibTorch moves no module to a device of a type that it does not know.
std::vector<at::Tensor> weights() {
  std::vector<at::Tensor> out;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{12, 8}, {12}, {5, 12}, {5}}) {
    const int64_t count = c10::multiply_integers(sizes);
    out.push_back((at::arange(count, at::kDouble) + static_cast<double>(sizes.size())).sin().view(sizes) * 0.3);
    out.back().requires_grad_();
  }
  return out;
}
const std::vector<Placement> kCuts = {Shard(0), Shard(0), Shard(1), Replicate()};

std::vector<at::Tensor> cut_weights(const DeviceMesh& mesh) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& each : weights()) {
    out.push_back(distribute_tensor(each.detach().to(device()), mesh, {kCuts[out.size()]}).detach().requires_grad_());
  }
  return out;
}

at::Tensor forward(const at::Tensor& x, const std::vector<at::Tensor>& w) {
  return at::linear(at::gelu(at::linear(x, w[0], w[1])), w[2], w[3]);
}

at::Tensor batch(int64_t step) { return (numbers_at_once(static_cast<double>(step), 6, 8) * 0.7).sin(); }

}  // namespace

TESSERA_RANKS_TEST_CASE("redistribution on streams of the ranks' own gives the same values", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (const Placement& from : kPlacements) {
    for (const Placement& to : kPlacements) {
      CAPTURE(to_string(from));
      CAPTURE(to_string(to));
      const at::Tensor now = redistribute(late_spread(1, 5, 7, mesh, from), {to});
      const at::Tensor later = redistribute(late_spread(2, 5, 7, mesh, from), {to}, {.async = true});
      const std::vector<at::Tensor> many =
          redistribute_many({late_spread(3, 5, 7, mesh, from), late_spread(4, 2, 3, mesh, from)}, {{to}, {to}});
      CHECK(worst(full_tensor(now), numbers_at_once(1, 5, 7)) == 0);
      CHECK(worst(full_tensor(later), numbers_at_once(2, 5, 7)) == 0);
      CHECK(worst(full_tensor(many[0]), numbers_at_once(3, 5, 7)) == 0);
      CHECK(worst(full_tensor(many[1]), numbers_at_once(4, 2, 3)) == 0);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a parameter that one stream has gathered is read on another", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    const double first = 100.0 * round;
    const at::Tensor parameter = late_spread(first, 6, 4, mesh, Shard(0));
    tessera::detail::Meta& meta = tessera::detail::meta(parameter);
    meta.contract = std::make_shared<Contract>(Contract{.path = "weight"});
    GatherSchedule schedule({.keeps = true});
    schedule.add(parameter);
    const auto whole = [&] { return schedule.gather("weight", meta, *with_placements(*meta.spec, {Replicate()})); };
    CHECK(worst(whole() * 1, numbers_at_once(first, 6, 4)) == 0);
    parameter.add_(1);  // it is gathered again
    whole();
    at::Tensor doubled;
    {
      const OwnStream other(1);
      doubled = whole() * 2;
    }
    parameter.add_(1);
    whole();  // frees what the other stream may still read
    const OwnStream other(1);
    CHECK(worst(doubled, (numbers_at_once(first, 6, 4) + 1) * 2) == 0);
  }
}

TESSERA_RANKS_TEST_CASE("a DTensor goes to a mesh on another type of device, and its gradient comes back", {2, 3}) {
  const DeviceMesh late = tp_line(), cpu = init_device_mesh("cpu", {world_size()}, {"tp"}, world());
  const OwnStream stream;
  const at::Tensor want = numbers_at_once(1, 6, 4);
  for (const Placement& from : kPlacements) {
    for (const Placement& to : kPlacements) {
      CAPTURE(to_string(Placements{from, to}));
      const at::Tensor x = late_spread(1, 6, 4, late, from).detach().requires_grad_();
      const at::Tensor moved = redistribute_to(x, cpu, {to});
      CHECK(mesh_of(moved) == cpu);
      CHECK(placements_of(moved) == Placements{to});
      CHECK(worst(full_tensor(moved), want) <= kTolerance);
      const at::Tensor back = redistribute_to(moved, late, {Shard(1)});
      CHECK(worst(full_tensor(back), want) <= kTolerance);
      (back * back).sum().backward();
      CHECK(mesh_of(x.grad()) == late);
      CHECK(placements_of(x.grad()) == Placements{from.is_partial() ? Replicate() : from});
      CHECK(worst(full_tensor(x.grad()), want * 2) <= kTolerance);
    }
  }
}

TESSERA_RANKS_TEST_CASE("the gradient of a tensor of the host that is distributed comes back to the host", {1, 2}) {
  const DeviceMesh late = tp_line();
  const OwnStream stream;
  for (const Placement& to : kPlacements) {
    CAPTURE(to_string(to));
    const at::Tensor t = numbers_at_once(1, 6, 4).requires_grad_();
    const at::Tensor there = distribute_tensor(t, late, {to});
    (there * there).sum().backward();
    CHECK(t.grad().is_cpu());
    CHECK(worst(t.grad(), numbers_at_once(1, 6, 4) * 2) <= kTolerance);
  }
}

TESSERA_RANKS_TEST_CASE("asynchronous results may be read on other streams than that of the start", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    const double first = 100.0 * round;
    std::vector<at::Tensor> results =
        redistribute_many({late_spread(first, 6, 4, mesh, Shard(0)), late_spread(first + 50, 5, 3, mesh, Shard(0))},
                          {{Replicate()}, {Replicate()}}, {.async = true});
    at::Tensor doubled;
    {
      const OwnStream other(1);
      // The result is dropped at once, while the other stream has not computed with it yet.
      doubled = to_local(std::exchange(results[0], at::Tensor())) * 2;
      const at::Tensor cpu = doubled.cpu();
      CHECK(worst(cpu, numbers_at_once(first, 6, 4) * 2) == 0);
    }
    CHECK(worst(to_local(results[1]), numbers_at_once(first + 50, 5, 3)) == 0);

    std::vector<at::Tensor> again =
        redistribute_many({late_spread(first, 6, 4, mesh, Shard(0)), late_spread(first + 50, 5, 3, mesh, Shard(0))},
                          {{Replicate()}, {Replicate()}}, {.async = true});
    {
      const OwnStream other(1);
      doubled = to_local(again[0]) * 2;  // the other stream waits, and this one must too
    }
    CHECK(worst(to_local(again[1]), numbers_at_once(first + 50, 5, 3)) == 0);
  }
}

TESSERA_RANKS_TEST_CASE("an asynchronous redistribution that keeps a part of its input may end on another stream",
                        {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    // Nothing is sent from a tensor that every rank has, nor on one rank.
    for (const Placement& source : {Shard(0), Replicate()}) {
      for (const Placement& target : {Shard(1), BlockCyclic(0, 2), Replicate()}) {
        if (source == target) continue;  // the tensor itself is returned
        CAPTURE(to_string(source));
        CAPTURE(to_string(target));
        // The input is dropped at once, and what is left of it when the redistribution ends.
        const std::vector<at::Tensor> results =
            redistribute_many({late_spread(round, 12, 6, mesh, source)}, {{target}}, {.async = true});
        const at::Tensor single =
            redistribute(late_spread(round + 50, 12, 6, mesh, source), {Shard(1)}, {.async = true});
        const OwnStream other(1);
        CHECK(worst(full_tensor(results[0]), numbers_at_once(round, 12, 6)) == 0);
        CHECK(worst(full_tensor(single), numbers_at_once(round + 50, 12, 6)) == 0);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("training on streams of the ranks' own gives what the CPU gives", {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  const std::vector<at::Tensor> here = weights(), there = cut_weights(mesh);
  torch::optim::SGD step_here(here, torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD step_there(there, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int64_t step = 0; step < 5; ++step) {
    step_here.zero_grad();
    step_there.zero_grad();
    const at::Tensor want = forward(batch(step), here);
    const at::Tensor got = forward(distribute_tensor(batch(step).to(device()), mesh, {Replicate()}), there);
    want.square().mean().backward();
    got.square().mean().backward();
    step_here.step();
    step_there.step();
    CHECK(worst(full_tensor(got), want) <= kTolerance);
  }
  for (std::size_t i = 0; i < here.size(); ++i) {
    CAPTURE(i);
    CHECK(worst(full_tensor(there[i]), here[i]) <= kTolerance);
    CHECK(worst(full_tensor(there[i].grad()), here[i].grad()) <= kTolerance);
  }
}

TESSERA_RANKS_TEST_CASE("gradients that come on different streams are reduced together as they were computed", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  const std::vector<at::Tensor> here = weights();
  std::vector<at::Tensor> there;
  std::vector<BucketedParameter> parameters;
  for (const at::Tensor& each : here) {
    there.push_back(distribute_tensor(each.detach().to(device()), mesh, {Replicate()}).detach().requires_grad_());
    parameters.push_back({.parameter = there.back(), .gradient = {Replicate()}});
  }
  bucket_gradients(parameters, {0});
  for (int64_t step = 0; step < kRounds; ++step) {
    const at::Tensor want = forward(batch(step), here);
    want.square().mean().backward();
    const at::Tensor x = distribute_tensor(batch(step).to(device()), mesh, {Shard(0)});
    // LibTorch's backward asks for the storage of what goes to another stream, which plain tensors alone have.
    const at::Tensor hidden = to_local(at::gelu(at::linear(x, there[0], there[1])));
    const StreamPoint computed = StreamPoint::here(device());
    at::Tensor loss;
    {
      const OwnStream other(1);
      computed.wait();
      computed.keep(hidden);
      const at::Tensor out = at::linear(from_local(hidden, mesh, {Shard(0)}, {.shape = {{6, 12}}}), there[2], there[3]);
      loss = full_tensor(out.square().mean());
    }
    loss.backward();
    for (std::size_t i = 0; i < here.size(); ++i) {
      CAPTURE(i);
      CHECK(worst(full_tensor(there[i].grad()), here[i].grad()) <= kTolerance);
      here[i].mutable_grad().reset();
      there[i].mutable_grad().reset();
    }
  }
}

TESSERA_RANKS_TEST_CASE("backward runs on the rank's own thread and sees its modes", {1, 2, 4}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  const std::vector<at::Tensor> there = cut_weights(mesh);
  int hooks = 0;
  for (const at::Tensor& each : there) {
    each.register_hook([&hooks, here = std::this_thread::get_id()](const at::Tensor&) {
      CHECK(std::this_thread::get_id() == here);
      CHECK(Strict::enabled());
      ++hooks;
    });
  }
  const at::Tensor x = distribute_tensor(batch(0).to(device()), mesh, {Replicate()});
  const at::Tensor loss = redistribute(forward(x, there), {Replicate()}).square().mean();
  const Strict strict;
  loss.backward();
  CHECK(hooks == 4);
}

TESSERA_RANKS_TEST_CASE("a mesh makes its device the current one, and refuses tensors on another", {1, 2}) {
  const c10::impl::VirtualGuardImpl guard(device().type());
  const c10::Device first(device().type(), 0), second(device().type(), 1);
  guard.setDevice(second);
  const DeviceMesh mesh = tp_line();
  CHECK(mesh.device() == first);
  CHECK(guard.getDevice() == first);
  CHECK_THROWS_AS(from_local(at::ones({2}), mesh, {Shard(0)}), std::invalid_argument);
  CHECK_THROWS_AS(from_local(at::ones({2}, second), mesh, {Shard(0)}), std::invalid_argument);
  CHECK_THROWS_AS(all_reduce(at::ones({2}, second), mesh, 0, ReduceOp::kSum), std::invalid_argument);
}

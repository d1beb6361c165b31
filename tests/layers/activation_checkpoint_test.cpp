#include "tessera/layers/activation_checkpoint.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/rng_tracker.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/forward_level.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/layers/checkpointed.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Tensors = std::vector<at::Tensor>;

void check_alike(const Tensors& a, const Tensors& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CAPTURE(i);
    CHECK(same(a[i], b[i]));
  }
}

}  // namespace

TEST_CASE("a checkpoint gives the same results, gradients and draws as without") {
  check_alike(run_checkpointed(true), run_checkpointed(false));
}

TESSERA_RANKS_TEST_CASE("the first input distributed: the same, gathered once, and the caller's tensor is left alone",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  CommCounter counter(mesh);
  const Tensors direct = run_checkpointed(false);
  CHECK(counter.total() == 0);
  check_alike(run_checkpointed(true, {.distribute_saved_activations = true, .mesh = mesh}), direct);
  CHECK(counter.count("all_gather") == (mesh.size() == 1 ? 0 : 1));
  CHECK(counter.total() == (mesh.size() == 1 ? 0 : 1));
  const at::Tensor x = leaf(at::ones({4, 4 * mesh.size()}, on(at::kFloat))),
                   y = leaf(at::ones({4, 4 * mesh.size()}, on(at::kFloat)) * 2);
  const Tensors out = checkpoint([](const Tensors& in) -> Tensors { return {in[0] + in[1]}; }, {x, y},
                                 {.distribute_saved_activations = true, .mesh = mesh});
  CHECK(same(out[0].detach(), at::ones_like(out[0]) * 3));
  CHECK(x.sizes() == at::IntArrayRef({4, 4 * mesh.size()}));
  CHECK(same(x.detach(), at::ones({4, 4 * mesh.size()}, on(at::kFloat))));
  out[0].sum().backward();
  CHECK(same(x.grad(), at::ones_like(x)));
}

TESSERA_RANKS_TEST_CASE("a function of tensors that returns one", {1, 2}) {
  const DeviceMesh mesh = line();
  const auto gradients = [&](bool checkpointed) {
    const at::Tensor x = leaf(spread(sample({5, 4}, 1), mesh, {Shard(0)})),
                     y = leaf(spread(sample({5, 4}, 2), mesh, {Shard(0)}));
    int calls = 0;
    const auto function = [&calls](const at::Tensor& a, at::Tensor b) {
      ++calls;
      return (a * b).tanh();
    };
    (checkpointed ? checkpoint(function, x, y) : function(x, y)).sum().backward();
    CHECK(calls == (checkpointed ? 2 : 1));
    return Tensors{full_tensor(x.grad()), full_tensor(y.grad())};
  };
  check_alike(gradients(true), gradients(false));
}

TESSERA_RANKS_TEST_CASE("DTensors: the draws of forward again, sharded or not", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
    const auto gradients = [&](bool checkpointed) {
      manual_seed(3, mesh.world());
      const at::Tensor x = leaf(spread(sample({5, 4}, 1), mesh, {placement}));
      const CheckpointFunction function = [](const Tensors& in) -> Tensors {
        return {at::dropout(in[0], 0.5, true).pow(2)};
      };
      at::Tensor y = x;
      for (int i = 0; i < 2; ++i) y = checkpointed ? checkpoint(function, {y})[0] : function({y})[0];
      y.sum().backward();
      return Tensors{full_tensor(y.detach()), full_tensor(x.grad()), full_tensor(at::rand_like(x.detach()))};
    };
    check_alike(gradients(true), gradients(false));
  }
}

TESSERA_RANKS_TEST_CASE("DTensors that the function captures or makes are drawn again, whatever the inputs",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor w = leaf(spread(sample({4, 6}, 1), mesh, {Shard(1)}));
  for (const bool with_input : {true, false}) {
    CAPTURE(with_input);
    const auto gradients = [&](bool checkpointed) {
      manual_seed(3, mesh.world());
      w.mutable_grad() = at::Tensor();
      std::vector<bool> modes;
      const ImplicitReplication guard;
      const CheckpointFunction inner = [&](const Tensors& in) -> Tensors {
        modes.push_back(ImplicitReplication::enabled());
        const at::Tensor product = in.empty() ? w.pow(2) : in[0].matmul(w);
        return {at::dropout(product, 0.5, true).pow(2)};
      };
      // One checkpoint is inside another.
      const CheckpointFunction function = [&](const Tensors& in) {
        return checkpointed ? checkpoint(inner, in) : inner(in);
      };
      const Tensors in = with_input ? Tensors{sample({5, 4}, 2)} : Tensors{};
      const at::Tensor y = checkpointed ? checkpoint(function, in)[0] : function(in)[0];
      {
        const ImplicitReplication off(false);
        y.sum().backward();
      }
      CHECK(modes == std::vector<bool>(checkpointed ? 3 : 1, true));
      return Tensors{full_tensor(y.detach()), full_tensor(w.grad()), full_tensor(at::rand_like(w.detach()))};
    };
    check_alike(gradients(true), gradients(false));
  }
}

TEST_CASE("streams are rewound for the second run, and put back after it") {
  at::manual_seed(9);
  rng_tracker().reset();
  rng_tracker().add("test", 11);
  const auto noisy = [](const Tensors& in) -> Tensors {
    const auto fork = rng_tracker().fork("test");
    return {at::dropout(in[0], 0.5, true)};
  };
  const at::Tensor x = leaf(at::ones({64}));
  const at::Tensor y = checkpoint(noisy, {x})[0];
  const auto next = [] {
    const auto fork = rng_tracker().fork("test");
    return at::rand({4});
  };
  const auto states = rng_tracker().get_states();
  const at::Tensor wanted = next();
  rng_tracker().set_states(states);
  y.sum().backward();
  CHECK(same(x.grad(), y.detach()));  // the same elements were dropped
  CHECK(same(next(), wanted));
  rng_tracker().reset();
}

TEST_CASE(
    "within a fork, in forward, in backward or in both: the draws of forward again, and the fork goes on where it "
    "was") {
  const at::Tensor x = leaf(at::ones({64}));
  // Draws from the caller's generators, and from the same stream in a fork of its own.
  const auto noisy = [](const Tensors& in) -> Tensors {
    const at::Tensor first = at::dropout(in[0], 0.5, true);
    const auto fork = rng_tracker().fork("test");
    return {at::dropout(first, 0.5, true)};
  };
  const auto forked = [](bool yes) {
    return std::unique_ptr<RngStatesTracker::Fork>(yes ? new RngStatesTracker::Fork(rng_tracker().fork("test"))
                                                       : nullptr);
  };
  for (const bool forked_forward : {false, true}) {
    for (const bool forked_backward : {false, true}) {
      at::manual_seed(9);
      rng_tracker().reset();
      rng_tracker().add("test", 11);
      at::Tensor y;
      {
        const auto fork = forked(forked_forward);
        y = checkpoint(noisy, {x})[0];
      }
      const auto fork = forked(forked_backward);
      const at::Tensor before = at::globalContext().defaultGenerator(c10::kCPU).get_state();
      x.mutable_grad().reset();
      y.sum().backward();
      CHECK(same(x.grad(), y.detach()));  // the same elements were dropped
      CHECK(same(at::globalContext().defaultGenerator(c10::kCPU).get_state(), before));
    }
  }
  rng_tracker().reset();
}

TEST_CASE("an exception of the second run puts every generator back") {
  const DeviceMesh mesh(World::fake(0, 1), c10::kCPU, Mesh({1}));
  rng_tracker().reset();
  rng_tracker().add("test", 11);
  int calls = 0;
  const at::Tensor x = leaf(at::ones({4}));
  const at::Tensor y = checkpoint(
      [&](const Tensors& in) -> Tensors {
        const auto fork = rng_tracker().fork("test");
        at::rand({5});
        tessera::rand({5}, mesh, {Replicate()});
        if (++calls == 2) throw std::runtime_error("not again");
        return {in[0] * 2};
      },
      {x}, {.mesh = mesh})[0];
  const auto states = rng_tracker().get_states();
  const auto next = [&]() -> Tensors {  // draws from the default generator, the stream, and for DTensors
    const at::Tensor plain = at::rand({4}), global = full_tensor(tessera::rand({4}, mesh, {Replicate()}));
    const auto fork = rng_tracker().fork("test");
    return {plain, at::rand({4}), global};
  };
  const auto begin = [&] {
    at::manual_seed(5);
    manual_seed(5, mesh.world());
    rng_tracker().set_states(states);
  };
  begin();
  const Tensors wanted = next();
  begin();
  CHECK_THROWS_WITH(y.sum().backward(), doctest::Contains("not again"));
  check_alike(next(), wanted);
  rng_tracker().reset();
}

TEST_CASE("gradients_lost_by_frozen_layers: what the function holds gets its gradient where no input wants one") {
  const at::Tensor x = at::ones({2, 3}, on(at::kDouble)), w = leaf(sample({3, 3}));
  const at::Tensor y = checkpoint([w](const Tensors& in) -> Tensors { return {at::matmul(in[0], w)}; }, {x})[0];
  y.sum().backward();
  CHECK(same(w.grad(), at::full({3, 3}, 2, on(at::kDouble))));
}

TEST_CASE("what the function holds and gives back stays as it was, and gets its gradient") {
  const at::Tensor x = leaf(sample({3})), held = leaf(sample({3}, 2)), buffer = sample({3}, 4);
  const Tensors out = checkpoint(
      [&](const Tensors& in) -> Tensors {
        return {in[0] * held, held, buffer, in[0]};
      },
      {x});
  CHECK(held.is_leaf());
  CHECK_FALSE(buffer.requires_grad());
  CHECK(same(out[1].detach(), held.detach()));
  CHECK(same(out[3].detach(), x.detach()));
  (out[0] + out[1] * 2 + out[2] + out[3]).sum().backward();
  CHECK(close(held.grad(), x.detach() + 2));
  CHECK(close(x.grad(), held.detach() + 1));
}

TESSERA_RANKS_TEST_CASE("distributed over one of two mesh dimensions", {4}) {
  const DeviceMesh plane = mesh_over({2, 2});
  const at::Tensor x = leaf(sample({4, 6}, static_cast<int64_t>(plane.local_rank(0))));  // differs between replicas
  CommCounter counter(plane);
  const at::Tensor y = checkpoint([](const Tensors& in) -> Tensors { return {in[0].pow(2)}; }, {x},
                                  {.distribute_saved_activations = true, .mesh = plane["d1"]})[0];
  y.sum().backward();
  CHECK(close(x.grad(), x.detach() * 2));
  CHECK(counter.count("all_gather") == 1);
}

TEST_CASE("the second run is under the autocast of the first") {
  const auto gradient = [](bool checkpointed) {
    const at::Tensor x = leaf(sample({4, 6}, 1, at::kFloat)), w = leaf(sample({6, 6}, 2, at::kFloat));
    const CheckpointFunction function = [w](const Tensors& in) -> Tensors {
      const at::Tensor y = at::matmul(in[0], w);
      CHECK(c10::toString(y.scalar_type()) == std::string("BFloat16"));
      return {y};
    };
    at::autocast::set_autocast_dtype(device().type(), at::kBFloat16);
    at::autocast::set_autocast_enabled(device().type(), true);
    const at::Tensor y = checkpointed ? checkpoint(function, {x})[0] : function({x})[0];
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device().type(), false);
    y.sum().backward();
    CHECK_FALSE(at::autocast::is_autocast_enabled(device().type()));
    return Tensors{y.detach(), x.grad(), w.grad()};
  };
  check_alike(gradient(true), gradient(false));
}

TEST_CASE("autocast's cache takes no gradient: of what a checkpoint and the region before and after it share") {
  const auto gradient = [](bool checkpointed, bool before, bool after) {
    const at::Tensor x = leaf(sample({6, 6}, 1, at::kFloat)), w = leaf(sample({6, 6}, 2, at::kFloat));
    const CheckpointFunction function = [w](const Tensors& in) -> Tensors { return {at::matmul(in[0], w)}; };
    at::autocast::set_autocast_dtype(device().type(), at::kBFloat16);
    at::autocast::set_autocast_enabled(device().type(), true);
    at::Tensor y = before ? at::matmul(x, w) : x;
    y = checkpointed ? checkpoint(function, {y})[0] : function({y})[0];
    if (after) y = at::matmul(y, w);
    y.sum().backward();
    at::autocast::set_autocast_enabled(device().type(), false);
    at::autocast::clear_cache();
    REQUIRE(w.grad().defined());
    return Tensors{x.grad(), w.grad()};
  };
  for (const bool before : {false, true}) {
    for (const bool after : {false, true}) {
      CAPTURE(before);
      CAPTURE(after);
      const Tensors got = gradient(true, before, after), want = gradient(false, before, after);
      // The gradients of a cast that is used twice are summed in bfloat16, those of two casts in float32.
      for (std::size_t i = 0; i < want.size(); ++i) CHECK(at::allclose(got[i], want[i], 1e-2, 1e-2));
    }
  }
}

TEST_CASE("inputs and results that are undefined, unused or want no gradient") {
  const at::Tensor x = leaf(sample({3}));
  const at::Tensor ids = at::arange(3, on(at::kLong));
  const Tensors out = checkpoint(
      [](const Tensors& in) -> Tensors {
        CHECK_FALSE(in[1].defined());
        return {in[0].index({in[2]}) * 3, in[2] + 1};
      },
      {x, at::Tensor(), ids});
  CHECK(same(out[1], ids + 1));
  out[0].sum().backward();
  CHECK(same(x.grad(), at::full({3}, 3, on(at::kDouble))));
  const c10::AutoGradMode none(false);
  CHECK_FALSE(checkpoint([](const Tensors& in) -> Tensors { return {in[0] + 1}; }, {x})[0].requires_grad());
}

TEST_CASE("second_backward and single gradients are errors that say what to do") {
  const at::Tensor x = leaf(sample({3}));
  const auto twice = [](const Tensors& in) -> Tensors { return {in[0] * in[0]}; };
  const at::Tensor y = checkpoint(twice, {x})[0].sum();
  CHECK_THROWS_WITH(torch::autograd::grad({y}, {x}), doctest::Contains("not compatible with torch::autograd::grad"));
  const at::Tensor z = checkpoint(twice, {x})[0].sum();
  z.backward();
  CHECK_THROWS_WITH(z.backward(), doctest::Contains("second time"));
}

TESSERA_RANKS_TEST_CASE("a result of operators is passed to several checkpoints, and refused where they capture it",
                        {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = leaf(sample({4, 3}), mesh, {Shard(0)}), source = leaf(sample({4, 3}, 1), mesh, {Replicate()});
  const auto loss = [&](bool captures) {
    const at::Tensor memory = source.sin();
    at::Tensor h = x;
    for (int i = 0; i < 2; ++i) {
      h = captures ? checkpoint([memory](const at::Tensor& t) { return t * memory; }, h)
                   : checkpoint([](const at::Tensor& t, const at::Tensor& m) { return t * m; }, h, memory);
    }
    return h.sum();
  };
  CHECK_THROWS_WITH(loss(/*captures=*/true).backward(),
                    doctest::Contains("checkpoint: the function captures a tensor that other operators have computed"));
  x.mutable_grad() = source.mutable_grad() = at::Tensor();
  loss(/*captures=*/false).backward();
  const at::Tensor whole = leaf(sample({4, 3})), of_source = leaf(sample({4, 3}, 1));
  (whole * of_source.sin().square()).sum().backward();
  CHECK(close(full_tensor(x.grad().detach()), whole.grad()));
  CHECK(close(full_tensor(source.grad().detach()), of_source.grad()));
}

TESSERA_RANKS_TEST_CASE("what cannot be distributed is refused before anything runs", {2}) {
  const DeviceMesh mesh = line();
  const CheckpointFunction function = [](const Tensors& in) -> Tensors {
    FAIL("it ran");
    return in;
  };
  const auto distribute = [&](const Tensors& inputs, const std::optional<DeviceMesh>& over) {
    checkpoint(function, inputs, {.distribute_saved_activations = true, .mesh = over});
  };
  CHECK_THROWS_WITH_AS(distribute({at::ones({4}, on(at::kFloat))}, std::nullopt),
                       doctest::Contains("give options.mesh"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(distribute({at::ones({5}, on(at::kFloat))}, mesh), doctest::Contains("5 is not divisible by 2"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(distribute({}, mesh), doctest::Contains("the first input is not there"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(distribute({spread(sample({4}), mesh, {Shard(0)})}, mesh), doctest::Contains("a DTensor"),
                       std::invalid_argument);
}

TEST_CASE("in forward mode the function is called itself, and what it holds keeps its derivative") {
  const ForwardLevel level;
  const at::Tensor x = leaf(sample({3})), change = sample({3}, 1);
  const at::Tensor held = dual(sample({3}, 2), sample({3}, 3));
  const auto product = [&](const Tensors& in) -> Tensors { return {in[0] * held}; };
  CHECK(close(tangent_of(checkpoint(product, {x})[0]).detach(), x.detach() * sample({3}, 3)));
  const at::Tensor y = checkpoint(product, {dual(x, change)})[0];
  CHECK(close(tangent_of(y).detach(), x.detach() * sample({3}, 3) + change * sample({3}, 2)));
  y.sum().backward();
  CHECK(close(x.grad().detach(), sample({3}, 2)));
}

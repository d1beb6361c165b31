#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/custom_placement/root_mean_square.h"
#include "tessera/examples/custom_placement/zigzag_parallel.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/custom_placement/placement_checks.h"
#include "tessera/tests/dtensor/redistribute/pairs.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;
using namespace custom_placement;

namespace {

const Placement Z = ZigzagShard(0);
const Placement RMS = RmsPartial();

// Is an average whose derivative lacks the number of ranks.
class WrongAverage final : public Reduction {
 public:
  WrongAverage() : Reduction("wrong average", ReduceOp::kSum) {}
  at::Tensor from_terms(const at::Tensor& terms, int64_t ranks) const override { return terms.div(ranks); }
  at::Tensor only_piece(const at::Tensor& value, int64_t ranks) const override { return value.mul(ranks); }
  at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const override {
    return coordinate == 0 ? value.mul(ranks) : at::zeros_like(value);
  }
  at::Tensor derivative(const at::Tensor& piece, const Peers&) const override { return at::ones_like(piece); }
};

// Gives every other element to the wrong part when it is asked a second time, as a class with a state may.
class Forgetful final : public Partition {
 public:
  Forgetful() : Partition("Forgetful", "") {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    Intervals out;
    append(out, chunk_range(size, parts, (index + calls_++ / 64) % parts));
    return out;
  }

 private:
  mutable std::atomic<int64_t> calls_ = 0;
};

// Is a sum whose derivative refuses a piece that requires grad.
class Detached final : public Reduction {
 public:
  Detached() : Reduction("detached", ReduceOp::kSum) {}
  at::Tensor derivative(const at::Tensor& piece, const Peers&) const override {
    if (piece.requires_grad()) throw std::runtime_error("the piece requires grad");
    return at::ones_like(piece);
  }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("zigzag: the parts", {1}) {
  const auto part = [](int64_t size, int64_t parts, int64_t index) { return Zigzag().part(size, parts, index); };
  CHECK(part(8, 2, 0) == Intervals{{0, 2}, {6, 8}});
  CHECK(part(8, 2, 1) == Intervals{{2, 6}});
  CHECK(part(3, 2, 0) == Intervals{{0, 1}});
  CHECK(part(3, 2, 1) == Intervals{{1, 3}});
  CHECK(part(0, 2, 1).empty());
  for (int64_t size = 0; size < 20; ++size) {
    for (int64_t parts = 1; parts < 6; ++parts) check_partition(Zigzag(), size, parts, "test");
  }
  CHECK(to_string(ZigzagShard(1)) == "Zigzag(1)");
  CHECK(to_string(RmsPartial()) == "P(rms)");
}

TEST_CASE("a zigzag and a root mean square go to and from every built-in placement") {
  CHECK_NOTHROW(check_placement(ZigzagShard(0)));
  CHECK_NOTHROW(check_placement(RmsPartial()));
}

TEST_CASE("check_placement finds wrong gradients, parts that change, and placements that fit no mesh") {
  CHECK_NOTHROW(check_placement(Shard(0), {.shapes = {{3, 2}}, .meshes = {{2}}}));
  CHECK_NOTHROW(check_placement(Partial(ReduceOp::kMax), {.shapes = {{3, 2}}, .meshes = {{2}}}));
  const Placement average = Partial(std::make_shared<const WrongAverage>());
  CHECK_THROWS_WITH_AS(check_placement(average, {.shapes = {{3, 2}}, .meshes = {{2}}}),
                       doctest::Contains("the derivative of P(wrong average)"), std::runtime_error);
  CHECK_NOTHROW(check_placement(average, {.shapes = {{3, 2}}, .meshes = {{2}}, .gradients = false}));
  const Placement forgetful = Shard(0, std::make_shared<const Forgetful>());
  CHECK_THROWS_AS(check_placement(forgetful, {.shapes = {{7, 5}}, .meshes = {{2}}}), std::runtime_error);
  CHECK_THROWS_WITH_AS(check_placement(RaggedShard(0, {1, 2}), {.shapes = {{7, 5}}, .meshes = {{2}}}),
                       doctest::Contains("cannot lay out any of the shapes"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("from a zigzag to a root mean square and back the value stays", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  REQUIRE_NOTHROW(check_pair({.from = {Z}, .to = {RMS}}, whole_numbers({9, 5}), mesh, 1e-12));
}

TESSERA_RANKS_TEST_CASE("on (2, 2): to a zigzag of a root mean square from every list of built-in placements, and back",
                        Ranks({4}).time_limit(std::chrono::seconds(200))) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const at::Tensor whole = whole_numbers({9, 5});
  for (const Placements& other : built_in_layouts({9, 5}, {2, 2})) {
    REQUIRE_NOTHROW(check_pair({.from = other, .to = {Z, RMS}}, whole, mesh, 1e-12));
  }
}

TESSERA_RANKS_TEST_CASE("on (2, 2): bits of integers come from and go to a zigzag", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const at::Tensor whole = whole_numbers({9, 5}, at::kLong);
  for (const Placements& other : integer_layouts({9, 5}, {2, 2})) {
    REQUIRE_NOTHROW(check_pair({.from = other, .to = {Z, Partial(ReduceOp::kBitXor)}}, whole, mesh));
  }
  CHECK_THROWS_WITH_AS(redistribute(spread(whole, mesh, {Z, Z}), {RMS, RMS}),
                       doctest::Contains("P(rms) of Long is not defined"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("the gradient of a root mean square reaches the pieces as in one process", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor all = sample({mesh.size(), 7}, 4);
  const at::Tensor rows = all.clone().requires_grad_(true);
  rows.square().mean(0).sqrt().sum().backward();
  const at::Tensor piece = all[mesh.local_rank(0)].clone().requires_grad_(true);
  full_tensor(from_local(piece, mesh, {RmsPartial()})).sum().backward();
  CHECK(close(piece.grad(), rows.grad()[mesh.local_rank(0)]));
}

TESSERA_RANKS_TEST_CASE("a reduction's derivative is given pieces that do not require grad", {1, 2}) {
  const at::Tensor piece = sample({3, 2}).requires_grad_(true);
  full_tensor(from_local(piece, line(), {Partial(std::make_shared<const Detached>())})).sum().backward();
  CHECK(same(piece.grad(), at::ones_like(piece.detach())));
}

TESSERA_RANKS_TEST_CASE("the root mean square of float16 numbers whose squares overflow is right", {1, 2, 3}) {
  const at::Tensor piece = sample({4}).fill_(300).to(at::kHalf).requires_grad_(true);
  const at::Tensor value = full_tensor(from_local(piece, line(), {RMS}));
  CHECK(same(value.detach(), piece.detach()));
  value.sum().backward();
  const at::Tensor want = at::full_like(piece.detach(), 1.0 / static_cast<double>(line().size()));
  CHECK(close(piece.grad().to(at::kFloat), want.to(at::kFloat), 1e-3));
}

TESSERA_RANKS_TEST_CASE("operators run on a zigzag as on any shard, without communication", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor a = sample({9, 4}), b = sample({9, 4}, 1), w = sample({4, 3}, 2);
  const at::Tensor za = spread(a, mesh, {ZigzagShard(0)}), zb = spread(b, mesh, {ZigzagShard(0)});
  const at::Tensor replicated = spread(w, mesh, {Replicate()});
  const CommCounter counter(mesh);
  const at::Tensor sum = at::gelu(za + zb * 2);
  const at::Tensor product = at::mm(za, replicated);
  const at::Tensor mean = za.mean(0);
  CHECK(counter.total() == 0);
  CHECK(placements_of(sum) == Placements{ZigzagShard(0)});
  CHECK(placements_of(product) == Placements{ZigzagShard(0)});
  CHECK(close(full_tensor(sum), at::gelu(a + b * 2)));
  CHECK(close(full_tensor(product), at::mm(a, w)));
  CHECK(close(full_tensor(mean), a.mean(0)));
}

TESSERA_RANKS_TEST_CASE("operators reduce a root mean square that they cannot take as it is, as one process has it",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor all = sample({mesh.size(), 9, 4}, 4), b = sample({9, 4}, 1), w = sample({4, 3}, 2);
  const at::Tensor rows = all.clone().requires_grad_(true);
  const at::Tensor rms = rows.square().mean(0).sqrt();
  const at::Tensor other = spread(b, mesh, {Shard(0)}), right = spread(w, mesh, {Replicate()});
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&, bool)>>> operators = {
      {"gelu", [](const at::Tensor& x, bool) { return at::gelu(x); }},
      {"add", [&](const at::Tensor& x, bool plain) { return x + (plain ? b : other); }},
      {"mul by a number", [](const at::Tensor& x, bool) { return x * -2; }},
      {"add to itself", [](const at::Tensor& x, bool) { return x + x; }},
      {"mm", [&](const at::Tensor& x, bool plain) { return at::mm(x, plain ? w : right); }},
      {"sum", [](const at::Tensor& x, bool) { return x.sum(0); }},
      {"transpose", [](const at::Tensor& x, bool) { return x.t().contiguous(); }}};
  for (const auto& row : operators) {
    CAPTURE(row.first);
    const auto& call = row.second;
    rows.mutable_grad().reset();
    const at::Tensor want = call(rms, true);
    want.square().sum().backward({}, /*retain_graph=*/true);
    const at::Tensor piece = all[mesh.local_rank(0)].clone().requires_grad_(true);
    const at::Tensor got = call(from_local(piece, mesh, {RMS}), false);
    CHECK(close(full_tensor(got).detach(), want.detach()));
    full_tensor(got).square().sum().backward();
    CHECK(close(piece.grad(), rows.grad()[mesh.local_rank(0)]));
  }
}

TESSERA_RANKS_TEST_CASE("a style that lays the sequence out in a zigzag", {1, 2, 3, 4}) {
  torch::manual_seed(1);
  torch::nn::LayerNorm plain(torch::nn::LayerNormOptions({6}));
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({6}));
  plain->to(at::kDouble);
  norm->to(at::kDouble);
  const DeviceMesh mesh = line();
  auto parallel = parallelize_module(norm, mesh, {{"", ZigzagSequenceParallel()}});
  const at::Tensor x = sample({2, 9, 6});
  const at::Tensor weight = sample({2, 9, 6}, 7);
  (plain(x) * weight).sum().backward();
  const at::Tensor y = parallel(spread(x, mesh, {ZigzagShard(1)}));
  CHECK(placements_of(y) == Placements{ZigzagShard(1)});
  CHECK(close(full_tensor(y).detach(), plain(x).detach()));
  (y * spread(weight, mesh, {ZigzagShard(1)})).sum().backward();
  CHECK(close(full_tensor(norm->weight.grad()), plain->weight.grad()));
}

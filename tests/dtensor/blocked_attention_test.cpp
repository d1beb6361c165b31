// Tests attention with dropout in blocks against LibTorch's formula in one process with the same draws: results,
// gradients, gradients of gradients; that draws depend neither on the mesh nor on the blocks; and what is left to the
// formula on DTensors.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/ops/kernels/blocked_attention.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;
using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

namespace {

constexpr double kDropped = 0.4;

struct Case {
  std::string name;
  Sizes query = {2, 3, 5, 4}, key = {2, 3, 6, 4}, value = {2, 3, 6, 7};  // fewer items than ranks, uneven heads
  std::optional<Sizes> mask = std::nullopt;
  bool of_truth = false;
  bool causal = false;
  std::optional<double> scale = std::nullopt;
  bool grouped = false;
};

const std::vector<Case> kCases = {
    {.name = "no mask"},
    {.name = "causal, fewer rows than keys", .causal = true},
    {.name = "causal, more rows than keys", .query = {2, 3, 8, 4}, .causal = true},
    {.name = "a scale below zero", .scale = -0.3},
    {.name = "truth values, rows that attend to nothing among them", .mask = Sizes{5, 6}, .of_truth = true},
    {.name = "terms of each head", .mask = Sizes{3, 5, 6}},
    {.name = "terms of each item, for each key", .mask = Sizes{2, 1, 1, 6}, .causal = true},
    {.name = "truth values of each item and head", .mask = Sizes{2, 3, 5, 6}, .of_truth = true},
    {.name = "groups of heads", .query = {2, 8, 5, 4}, .key = {2, 4, 6, 4}, .value = {2, 4, 6, 7}, .grouped = true},
    {.name = "groups of heads under a mask",
     .query = {3, 8, 5, 4},
     .key = {3, 2, 6, 4},
     .value = {3, 2, 6, 7},
     .mask = Sizes{8, 5, 1},
     .grouped = true},
};

// Returns query, key, value and the mask, if there is one.
Tensors plain_inputs(const Case& c) {
  Tensors out = {sample(c.query, 1), sample(c.key, 2), sample(c.value, 3)};
  for (at::Tensor& t : out) t.requires_grad_(true);
  if (!c.mask) return out;
  at::Tensor mask = sample(*c.mask, 4);
  if (c.of_truth) {
    mask = mask > -0.2;
    mask.select(-2, 1).fill_(false);
  }
  out.push_back(mask);
  return out;
}

// Returns a mask's layout beside a query laid out as `layout`: cut where it has that dimension and more than one index.
Placements mask_layout(const Sizes& mask, const Placements& layout) {
  Placements out;
  for (const Placement& p : layout) {
    const int64_t own = p.is_shard() ? p.tensor_dim() - (4 - std::ssize(mask)) : -1;
    out.push_back(own >= 0 && mask.at(static_cast<std::size_t>(own)) > 1 ? Shard(own) : Replicate());
  }
  return out;
}

Tensors spread_inputs(const Case& c, const DeviceMesh& mesh, const Placements& layout) {
  Tensors out;
  for (const at::Tensor& t : plain_inputs(c)) {
    const at::Tensor here = spread(t.detach(), mesh, out.size() == 3 ? mask_layout(*c.mask, layout) : layout);
    out.push_back(here.detach().requires_grad_(t.requires_grad()));
  }
  return out;
}

std::optional<at::Tensor> mask_in(const Tensors& in) { return in.size() > 3 ? std::optional(in[3]) : std::nullopt; }

// Returns 1 where at::dropout of the scores would keep one with this world's next draw, and 0 elsewhere.
at::Tensor next_kept(const Case& c, const DeviceMesh& mesh) {
  const RandomState before = mesh.world().random_state();
  const at::Tensor ones = at::ones({c.query[0], c.query[1], c.query[2], c.key[2]}, at::kDouble);
  const at::Tensor dropped = full_tensor(
      at::dropout(spread(ones, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate())), kDropped, true));
  mesh.world().random_state() = before;
  return dropped.ne(0);
}

// Returns LibTorch's formula in one process.
at::Tensor formula(const Case& c, const Tensors& in, const at::Tensor& kept) {
  std::optional<at::Tensor> mask = mask_in(in);
  if (mask && mask->scalar_type() == at::kBool) {
    mask = at::zeros(mask->sizes(), at::kDouble).masked_fill(mask->logical_not(), -INFINITY);
  }
  if (mask && c.causal) {
    const at::Tensor later = at::ones({c.query[2], c.key[2]}, at::kBool).triu(1);
    mask = mask->expand({c.query[0], c.query[1], c.query[2], c.key[2]}).masked_fill(later, -INFINITY);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(in[0], in[1], in[2], mask, kDropped, c.causal && !mask,
                                                            kept, c.scale, c.grouped));
}

at::Tensor attend(const Case& c, const Tensors& in) {
  return at::scaled_dot_product_attention(in[0], in[1], in[2], mask_in(in), kDropped, c.causal, c.scale, c.grouped);
}

// Says whether each rank's heads of queries use heads of keys of its own alone.
bool groups_fit(const Case& c, const DeviceMesh& mesh, const Placements& layout) {
  int64_t parts = 1;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    if (layout[i] == Shard(1)) parts *= mesh.size(static_cast<int64_t>(i));
  }
  return !c.grouped || c.key[1] % parts == 0;
}

void check(const Case& c, const DeviceMesh& mesh, const Placements& layout) {
  INFO(fmt::format("{}; {}", c.name, to_string(layout)));
  manual_seed(11, mesh.world());
  const Tensors plain = plain_inputs(c), inputs = spread_inputs(c, mesh, layout);
  const at::Tensor expected = formula(c, plain, next_kept(c, mesh));
  const at::Tensor gradient = sample(expected.sizes(), 7);
  expected.backward(gradient);
  const uint64_t draws = mesh.world().random_state().counter;
  CommCounter counter(mesh);
  const at::Tensor result = attend(c, inputs);
  CHECK(mesh.world().random_state().counter == draws + 1);
  CHECK(close(full_tensor(result.detach()), expected.detach()));
  counter.reset();
  result.backward(spread(gradient, mesh, layout));
  if (groups_fit(c, mesh, layout)) {
    CHECK(placements_of(result) == layout);
    CHECK(counter.total() == 0);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(i);
    CHECK(close(full_tensor(inputs[i].grad()), plain[i].grad(), 1e-11));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("attention with dropout is LibTorch's formula with the draws of at::dropout", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : all_layouts(mesh.ndim(), {Replicate(), Shard(0), Shard(1)})) {
      for (const Case& c : kCases) check(c, mesh, layout);
    }
  }
}

TESSERA_RANKS_TEST_CASE("attention with dropout communicates nothing where every rank has whole groups of heads",
                        {2, 4}) {
  const DeviceMesh mesh = line();
  const Strict strict;
  for (const Placement& placement : {Replicate(), Shard(0), Shard(1)}) {
    for (const Case& c : kCases) {
      if (!groups_fit(c, mesh, {placement})) continue;
      const Tensors inputs = spread_inputs(c, mesh, {placement});
      CommCounter counter(mesh);
      attend(c, inputs).sum().backward();
      CHECK(counter.total() == 0);
    }
  }
}

TESSERA_RANKS_TEST_CASE("which scores are kept depends neither on the mesh nor on the size of a block", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    const Case wide = {.name = "", .query = {3, 4, 9, 4}, .key = {3, 4, 8, 4}, .value = {3, 4, 8, 8}};
    manual_seed(3, mesh.world());
    const at::Tensor kept = next_kept(wide, mesh);
    const tessera::detail::DrawKey key = tessera::detail::next_draw(mesh.world());
    for (const Placements& layout : all_layouts(mesh.ndim(), {Replicate(), Shard(0), Shard(1)})) {
      const at::Tensor one = at::eye(8, at::kDouble).expand({3, 4, 8, 8});  // the result is the dropped softmax
      const at::Tensor q = piece_of(sample(wide.query, 1), mesh, layout),
                       k = piece_of(sample(wide.key, 2), mesh, layout), v = piece_of(one, mesh, layout);
      const at::Tensor here = piece_of(kept, mesh, layout);
      for (const int64_t most : {1, 11, 16, 100, 1000, 0}) {
        CAPTURE(most);
        const at::Tensor out =
            tessera::detail::blocked_attention(q, k, v, {},
                                               {.probability = kDropped,
                                                .key = key,
                                                .scores = intern_spec(mesh, layout, {3, 4, 9, 8}, at::kDouble),
                                                .most = most});
        CHECK(same(out.ne(0), here));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("gradients do not depend on the size of a block beyond rounding", {1, 2}) {
  const DeviceMesh mesh = line();
  for (std::size_t i = 0; i < 2 * kCases.size(); ++i) {
    const Case& c = kCases[i / 2];
    const Placements layout = {Shard(static_cast<int64_t>(i % 2))};
    INFO(fmt::format("{}; {}", c.name, to_string(layout)));
    if (!groups_fit(c, mesh, layout)) continue;
    const tessera::detail::DrawKey key = tessera::detail::next_draw(mesh.world());
    std::vector<Tensors> grads;
    for (const int64_t most : {1, 13, 48, 200, 100000}) {  // a group of heads has 60 to 120 scores
      Tensors in;
      for (const at::Tensor& t : spread_inputs(c, mesh, layout))
        in.push_back(to_local(t.detach()).clone().requires_grad_(t.requires_grad()));
      const at::Tensor out = tessera::detail::blocked_attention(
          in[0], in[1], in[2], mask_in(in).value_or(at::Tensor()),
          {.probability = kDropped,
           .causal = c.causal,
           .scale = c.scale,
           .key = key,
           .scores = intern_spec(mesh, layout, {c.query[0], c.query[1], c.query[2], c.key[2]}, at::kDouble),
           .most = most});
      out.backward(sample(out.sizes(), 5));
      grads.push_back({in[0].grad(), in[1].grad(), in[2].grad()});
      for (std::size_t g = 0; g < 3; ++g) CHECK(close(grads.back()[g], grads.front()[g]));
    }
  }
}

TESSERA_RANKS_TEST_CASE("backward refuses a query, key or value that was changed in place since", {1, 2}) {
  const DeviceMesh mesh = line();
  for (std::size_t changed = 0; changed < 3; ++changed) {
    CAPTURE(changed);
    Tensors inputs = spread_inputs({.name = ""}, mesh, {Shard(1)});
    for (at::Tensor& t : inputs) t = t.mul(2);
    const at::Tensor result = attend({.name = ""}, inputs);
    inputs[changed].add_(1);
    CHECK_THROWS_WITH_AS(result.sum().backward(), doctest::Contains("modified by an inplace operation"), c10::Error);
  }
}

TESSERA_RANKS_TEST_CASE("gradients of gradients of attention with dropout", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const Case& c : kCases) {
    CAPTURE(c.name);
    const Placements layout = {Shard(0)};
    manual_seed(5, mesh.world());
    const Tensors plain = plain_inputs(c), inputs = spread_inputs(c, mesh, layout);
    const auto twice = [](const at::Tensor& out, const Tensors& in) {
      out.square().sum().backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/true);
      at::Tensor sum;
      for (std::size_t i = 0; i < 3; ++i) {
        const at::Tensor term = in[i].grad().square().sum();
        sum = sum.defined() ? sum + term : term;
        in[i].mutable_grad().reset();
      }
      sum.backward();
    };
    twice(formula(c, plain, next_kept(c, mesh)), plain);
    twice(attend(c, inputs), inputs);
    for (std::size_t i = 0; i < 3; ++i) CHECK(close(full_tensor(inputs[i].grad()), plain[i].grad(), 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("attention with dropout of an expanded query, and of transposed projections", {1, 2}) {
  const DeviceMesh mesh = line();
  const Case c = {.name = ""};
  for (const bool heads : {false, true}) {
    CAPTURE(heads);
    manual_seed(5, mesh.world());
    const Tensors plain = plain_inputs(c), inputs = spread_inputs(c, mesh, {Replicate()});
    const Sizes latents = heads ? Sizes{2, 1, 5, 4} : Sizes{1, 3, 5, 4};
    const at::Tensor one = sample(latents, 8).requires_grad_(true);
    const at::Tensor spread_one = spread(one.detach(), mesh, {Replicate()}).detach().requires_grad_(true);
    const auto transposed = [](const at::Tensor& t) { return t.transpose(1, 2).contiguous().transpose(1, 2); };
    const at::Tensor expected = formula(c, {one.expand(c.query), plain[1], plain[2]}, next_kept(c, mesh));
    const at::Tensor result = attend(c, {spread_one.expand(c.query), transposed(inputs[1]), transposed(inputs[2])});
    CHECK(close(full_tensor(result.detach()), expected.detach()));
    expected.square().sum().backward();
    result.square().sum().backward();
    CHECK(close(full_tensor(spread_one.grad()), one.grad(), 1e-11));
    CHECK(close(full_tensor(inputs[1].grad()), plain[1].grad(), 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("a mask's gradient under dropout, and layouts that cut the sequence", {2, 3}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {Shard(0), Shard(1), Shard(2)}) {
    CAPTURE(to_string(placement));
    const Case c = {.name = "", .query = {2, 3, 6, 4}, .mask = Sizes{6, 6}};
    manual_seed(5, mesh.world());
    Tensors plain = plain_inputs(c), inputs = spread_inputs(c, mesh, {placement});
    plain[3].requires_grad_(true);
    inputs[3] = spread(plain[3].detach(), mesh, {Replicate()}).detach().requires_grad_(true);
    const at::Tensor expected = formula(c, plain, next_kept(c, mesh)), result = attend(c, inputs);
    CHECK(close(full_tensor(result.detach()), expected.detach()));
    expected.square().sum().backward();
    result.square().sum().backward();
    for (std::size_t i = 0; i < 4; ++i) CHECK(close(full_tensor(inputs[i].grad()), plain[i].grad(), 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("a recomputation from the same random state drops the same scores, in 16 bits too", {2}) {
  const DeviceMesh mesh = line();
  const Case c = kCases[1];
  const Tensors inputs = spread_inputs(c, mesh, {Shard(1)});
  const RandomState before = mesh.world().random_state();
  const at::Tensor once = attend(c, inputs);
  const RandomState after = mesh.world().random_state();
  mesh.world().random_state() = before;
  CHECK(same(full_tensor(attend(c, inputs).detach()), full_tensor(once.detach())));
  CHECK(mesh.world().random_state().counter == after.counter);
  once.sum().backward();
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    CAPTURE(c10::toString(type));
    mesh.world().random_state() = before;
    Tensors rounded;
    for (const at::Tensor& t : inputs) rounded.push_back(t.detach().to(type).requires_grad_(true));
    const at::Tensor low = attend(c, rounded);
    CHECK((low.scalar_type() == type));
    const double rounding = type == at::kHalf ? 0.005 : 0.03;
    CHECK(close(full_tensor(low.detach()).to(at::kDouble), full_tensor(once.detach()), rounding));
    low.sum().backward();
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(close(full_tensor(rounded[i].grad()).to(at::kDouble), full_tensor(inputs[i].grad()), 2 * rounding));
  }
}

TESSERA_RANKS_TEST_CASE("the blocks of scores tile them, in whole groups of heads", {1}) {
  using tessera::detail::ScoreBlock;
  const tessera::detail::ScoreSizes sizes = {.items = 2, .heads = 2, .rows = 4, .keys = 8};
  const auto block = [](Interval items, Interval heads, Interval rows, int64_t keys) {
    return ScoreBlock{.items = items, .heads = heads, .rows = rows, .keys = keys};
  };
  const Interval both = {0, 2}, rows = {0, 4};
  CHECK((tessera::detail::score_blocks(sizes, 1000) == std::vector{block(both, both, rows, 8)}));
  CHECK((tessera::detail::score_blocks(sizes, 64) ==
         std::vector{block({0, 1}, both, rows, 8), block({1, 2}, both, rows, 8)}));
  CHECK(tessera::detail::score_blocks(sizes, 16).size() == 8);
  CHECK(tessera::detail::score_blocks(sizes, 1).size() == 16);
  CHECK(tessera::detail::score_blocks({.items = 2, .heads = 0, .rows = 4, .keys = 8}, 64).empty());
  const std::vector<ScoreBlock> groups =
      tessera::detail::score_blocks({.items = 1, .heads = 6, .rows = 2, .keys = 4, .group = 2}, 24);
  CHECK((groups == std::vector{block({0, 1}, both, {0, 2}, 4), block({0, 1}, {2, 4}, {0, 2}, 4),
                               block({0, 1}, {4, 6}, {0, 2}, 4)}));
  const std::vector<ScoreBlock> causal =
      tessera::detail::score_blocks({.items = 1, .heads = 1, .rows = 100, .keys = 80, .causal = true}, 7000);
  CHECK((causal == std::vector{block({0, 1}, {0, 1}, {0, 64}, 64), block({0, 1}, {0, 1}, {64, 100}, 80)}));
  CHECK(tessera::detail::score_blocks({.items = 1, .heads = 1, .rows = 100, .keys = 80, .causal = true}, 8000).size() ==
        1);
}

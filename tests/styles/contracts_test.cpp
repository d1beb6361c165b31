// Checks values and collectives of each style on real ranks, with local outputs and without: PyTorch's cases 34 to 36.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/embedding.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/placement/layout.h"
#include "tessera/styles/distribute_module.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/forward_level.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::Linear;

constexpr double kExact = 1e-13;

// Returns this rank's piece of `t` along `dim`.
at::Tensor piece(const at::Tensor& t, int64_t dim) {
  const Interval mine = chunk_range(t.size(dim), world_size(), rank());
  return t.narrow(dim, mine.begin, mine.size()).contiguous();
}

// Returns "all_reduce 1 all_gather 2", or "-" for none.
std::string counts(const CommCounter& counter) {
  std::string text;
  for (const char* kind : {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"}) {
    if (counter.count(kind) > 0)
      text += (text.empty() ? "" : " ") + std::string(kind) + " " + std::to_string(counter.count(kind));
  }
  return text.empty() ? "-" : text;
}

// Returns "-" on one rank, where nothing communicates.
std::string unless_alone(const std::string& text) { return world_size() == 1 ? "-" : text; }

struct Case {
  std::string why;
  Style style;
  Placement input;   // layout of x
  Placement output;  // layout of y
  const char* forward;
  const char* backward;
};

at::Tensor placed(const at::Tensor& x, const Placement& placement) {
  return placement.is_shard() ? piece(x, placement.tensor_dim() < 0 ? x.dim() - 1 : placement.tensor_dim()) : x.clone();
}

// Returns an input cut along `dim`: this rank's plain piece where all pieces have one size, else a DTensor, since a
// style cannot tell the whole size from an uneven piece.
at::Tensor cut_input(const at::Tensor& x, int64_t dim) {
  if (x.size(dim) % world_size() == 0) return piece(x, dim);
  return distribute_tensor(x, tp_line(), {Shard(dim)}, kNoSource);
}

// Returns what a tensor laid out as that input is compared with: the whole of a DTensor, or this rank's piece.
at::Tensor as_input(const at::Tensor& x, const at::Tensor& input, const Placement& placement) {
  return is_dtensor(input) ? x : placed(x, placement);
}

// Is a style of the user's own: as SequenceParallel, but with any layout of the sequence.
struct PartsOfSequence : ParallelStyle {
  explicit PartsOfSequence(Placement parts) : layout(std::move(parts)) {}
  void apply(ApplyContext& context) const override {
    context.contract("weight", {.operators = {"layer_norm"}, .input = layout, .desired = layout, .output = layout});
  }
  std::string name() const override { return "PartsOfSequence"; }
  Placement layout;
};

// Runs `forward`, whose result is plain and cut as `c` says, and the backward of its product with `weights`. Compares
// the result with `want`, and the collectives of both with those of `c`.
void run_both_ways(const Case& c, const DeviceMesh& mesh, const std::function<at::Tensor()>& forward,
                   const at::Tensor& want, const at::Tensor& weights) {
  CommCounter counter(mesh);
  const Strict strict;
  const at::Tensor got = forward();
  CHECK(counts(counter) == unless_alone(c.forward));
  REQUIRE_FALSE(is_dtensor(got));
  CHECK(difference(got, placed(want, c.output)) <= kExact);
  counter.reset();
  (got * placed(weights, c.output)).sum().backward();
  CHECK(counts(counter) == unless_alone(c.backward));
}

// Runs one Linear under `c`, where y is plain and each rank has its piece of it, as of x: see cut_input. The product
// tells the size of the features, so pieces of them are plain though uneven.
void run_linear(const Case& c, const at::Tensor& x, bool bias) {
  CAPTURE(c.why);
  CAPTURE(bias);
  CAPTURE(x.sizes());
  const DeviceMesh mesh = tp_line();
  const torch::nn::LinearOptions options = torch::nn::LinearOptions(x.size(-1), x.size(-1)).bias(bias);
  Linear reference(options), module(options);
  fill(*reference);
  fill(*module);
  module->weight.set_requires_grad(bias);
  parallelize_module(module, mesh, c.style);
  CHECK(module->weight.requires_grad() == bias);
  const bool by_rows = c.input.is_shard() && c.input.tensor_dim() == 0;
  at::Tensor want_x = leaf(x), got_x = leaf(by_rows ? cut_input(x, 0) : placed(x, c.input));
  const at::Tensor want = reference->forward(want_x);
  const at::Tensor weights = numbers(want.sizes().vec(), 5);
  (want * weights).sum().backward();

  run_both_ways(
      c, mesh, [&] { return module->forward(got_x); }, want, weights);
  CHECK(difference(got_x.grad(), as_input(want_x.grad(), got_x, c.input)) <= kExact);
  if (bias) check_parameters(*module, *reference, /*gradients=*/true, kExact);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("Linear with plain tensors in and out: values, gradients and collectives", {1, 2, 3, 4}) {
  // The last of four ranks has none of 5 rows or features.
  const std::vector<std::vector<int64_t>> shapes = {{8, 16}, {4, 3, 16}, {7, 5}, {5, 2, 7}};
  const std::vector<Case> cases = {
      {"34: colwise", ColwiseParallel({.use_local_output = true}), Replicate(), Shard(-1), "-", "all_reduce 1"},
      {"34: colwise from S(0)", ColwiseParallel({.input_layouts = Shard(0), .use_local_output = true}), Shard(0),
       Shard(-1), "all_gather 1", "reduce_scatter 1"},
      {"35: rowwise", RowwiseParallel({.use_local_output = true}), Shard(-1), Replicate(), "all_reduce 1", "-"},
  };
  for (const Case& c : cases) {
    for (const bool bias : {true, false}) {
      for (const std::vector<int64_t>& shape : shapes) run_linear(c, numbers(shape), bias);
    }
  }
  // The gradient of a bias added to pieces of the batch is summed over them, besides the collectives of the
  // activations.
  const Case scattered = {"35: rowwise to S(0)",
                          RowwiseParallel({.output_layouts = Shard(0), .use_local_output = true}),
                          Shard(-1),
                          Shard(0),
                          "reduce_scatter 1",
                          "all_gather 1"};
  for (const std::vector<int64_t>& shape : shapes) run_linear(scattered, numbers(shape), false);
}

TESSERA_RANKS_TEST_CASE("the product of a vector without gradients may be written by an operator that has them",
                        {1, 2}) {
  const DeviceMesh mesh = tp_line();
  const auto whole = [&](const at::Tensor& t) { return from_local(t, mesh, {Replicate()}); };
  const at::Tensor x = at::ones({4}, on(at::kDouble)), w = at::ones({3, 4}, on(at::kDouble)),
                   b = at::ones({3}, on(at::kDouble));
  at::Tensor y;
  {
    const c10::AutoGradMode no_gradient(false);
    y = at::linear(whole(x), whole(w), whole(b));
  }
  const at::Tensor added = whole(b).requires_grad_();
  y.add_(added);
  y.sum().backward();
  CHECK(at::equal(full_tensor(y.detach()), at::full({3}, 6, on(at::kDouble))));
  CHECK(at::equal(full_tensor(added.grad()), b));
}

TESSERA_RANKS_TEST_CASE("a forward-mode derivative of one operand alone passes a product with a contract", {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  const at::Tensor x = sample({4, 3, 6});
  for (const Style& style : {Style(ColwiseParallel()), Style(RowwiseParallel())}) {
    Linear reference(6, 5), module(6, 5);
    fill(*reference);
    fill(*module);
    reference->to(at::kDouble);
    module->to(at::kDouble);
    parallelize_module(module, mesh, style);
    for (int which = 0; which < 3; ++which) {
      CAPTURE(which);
      const ForwardLevel level;
      const auto with_tangent = [&](int index, const at::Tensor& t, const at::Tensor& like) {
        if (index != which) return t;
        const at::Tensor tangent = sample(like.sizes(), 5);
        return dual(t, is_dtensor(t) ? distribute_tensor(tangent, mesh, placements_of(t)) : tangent);
      };
      const at::Tensor want = at::linear(with_tangent(0, x, x), with_tangent(1, reference->weight, reference->weight),
                                         with_tangent(2, reference->bias, reference->bias));
      const at::Tensor given = from_local(x, mesh, {Replicate()});
      const at::Tensor got = at::linear(with_tangent(0, given, x), with_tangent(1, module->weight, reference->weight),
                                        with_tangent(2, module->bias, reference->bias));
      REQUIRE(tangent_of(got).defined());
      CHECK(close(full_tensor(tangent_of(got).detach()), tangent_of(want).detach()));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a rowwise bias under a scattered output: its gradient is reduced once", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  for (const bool local : {true, false}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{6, 12}, std::vector<int64_t>{6, 2, 12}}) {
      CAPTURE(local);
      CAPTURE(shape.size());
      Linear reference(12, 12), module(12, 12);
      fill(*reference);
      fill(*module);
      const at::Tensor x = numbers(shape), weights = numbers(shape, 5);
      (reference->forward(x) * weights).sum().backward();
      parallelize_module(module, mesh, RowwiseParallel({.output_layouts = Shard(0), .use_local_output = local}));
      const at::Tensor y = module->forward(piece(x, x.dim() - 1));
      CommCounter counter(mesh);
      if (local)
        (y * piece(weights, 0)).sum().backward();
      else
        (y * distribute_tensor(weights, mesh, {Shard(0)})).sum().backward();
      // With 2-D input addmm adds the bias to the terms of the sum, whose gradient was gathered for the weight's
      // gradient anyway.
      CHECK(counter.count_by_path("bias") == (x.dim() == 2 ? 0 : 1));
      check_parameters(*module, *reference, /*gradients=*/true, kExact);
    }
  }
}

TESSERA_RANKS_TEST_CASE("34: a bias is added to a plain output that another partition than chunks cuts", {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{7}, {5, 7}, {2, 5, 7}}) {
    for (const bool rowwise : {false, true}) {
      CAPTURE(sizes.size());
      CAPTURE(rowwise);
      torch::nn::Linear reference(7, 10), module(7, 10);
      fill(*reference);
      fill(*module);
      const at::Tensor x = numbers(sizes, 3);
      const at::Tensor want = reference->forward(x), weights = numbers(want.sizes().vec(), 5);
      (want * weights).sum().backward();
      const Placement output = BlockCyclic(-1, 1);
      const auto part = [&](const at::Tensor& t) {
        return to_local(distribute_tensor(t.detach(), mesh, {output}, kNoSource));
      };
      const Style style = rowwise
                              ? Style(RowwiseParallel(
                                    {.input_layouts = Replicate(), .output_layouts = output, .use_local_output = true}))
                              : Style(ColwiseParallel({.output_layouts = output, .use_local_output = true}));
      parallelize_module(module, mesh, style);
      const at::Tensor got = module->forward(x);
      REQUIRE_FALSE(is_dtensor(got));
      CHECK(difference(got, part(want)) <= kExact);
      (got * part(weights)).sum().backward();
      check_parameters(*module, *reference, /*gradients=*/true, kExact);
    }
  }
}

TESSERA_RANKS_TEST_CASE("35: Embedding by rows and by columns: values, gradients and collectives", {1, 2, 3, 4}) {
  const std::vector<Case> cases = {
      {"columns", ColwiseParallel({.use_local_output = true}), Replicate(), Shard(-1), "-", "-"},
      {"rows", RowwiseParallel({.use_local_output = true}), Replicate(), Replicate(), "all_reduce 1", "-"},
      {"rows to a sequence", RowwiseParallel({.output_layouts = Shard(1), .use_local_output = true}), Replicate(),
       Shard(1), "reduce_scatter 1", "all_gather 1"},
  };
  struct Table {
    int64_t rows, width;  // the sequence is as long as a row is wide
  };
  const DeviceMesh mesh = tp_line();
  for (const Case& c : cases) {
    for (const Table& table : {Table{13, 8}, Table{5, 7}, Table{7, 5}}) {
      CAPTURE(c.why);
      CAPTURE(table.width);
      const auto options = torch::nn::EmbeddingOptions(table.rows, table.width).padding_idx(3);
      torch::nn::Embedding reference(options), module(options);
      fill(*reference);
      fill(*module);
      const at::Tensor ids = at::arange(3 * table.width, on(at::kLong)).view({3, table.width}).remainder(table.rows);
      const at::Tensor want = reference->forward(ids), weights = numbers(want.sizes().vec(), 5);
      (want * weights).sum().backward();
      parallelize_module(module, mesh, c.style);
      run_both_ways(
          c, mesh, [&] { return module->forward(ids); }, want, weights);
      check_parameters(*module, *reference, /*gradients=*/true, kExact);
    }
  }
}

TESSERA_RANKS_TEST_CASE("36: SequenceParallel LayerNorm: output S(1), no collective forward", {1, 2, 3, 4}) {
  const DeviceMesh mesh = tp_line();
  for (const int64_t sequence : {8 * world_size(), int64_t{7}, int64_t{5}}) {
    const at::Tensor x = numbers({20, sequence, 12});
    for (const bool local : {true, false}) {
      CAPTURE(sequence);
      CAPTURE(local);
      torch::nn::LayerNorm reference(torch::nn::LayerNormOptions({12})), module(torch::nn::LayerNormOptions({12}));
      fill(*reference);
      fill(*module);
      at::Tensor want_x = leaf(x), got_x = leaf(cut_input(x, 1));
      const at::Tensor want = reference->forward(want_x), weights = numbers(want.sizes().vec(), 5);
      (want * weights).sum().backward();
      parallelize_module(module, mesh, SequenceParallel(1, {.use_local_output = local}));
      CommCounter counter(mesh);
      const Strict strict;
      const at::Tensor got = module->forward(got_x);
      CHECK(counts(counter) == "-");
      REQUIRE(is_dtensor(got) == !local);
      if (local) {
        CHECK(difference(got, piece(want, 1)) <= kExact);
        (got * piece(weights, 1)).sum().backward();
      } else {
        CHECK(placements_of(got) == Placements{Shard(1)});
        (got * distribute_tensor(weights, mesh, {Shard(1)})).sum().backward();
      }
      CHECK(difference(got_x.grad(), as_input(want_x.grad(), got_x, Shard(1))) <= kExact);
      check_parameters(*module, *reference, /*gradients=*/true, kExact);
    }
  }
}

TESSERA_RANKS_TEST_CASE("36: plain pieces of a norm whose sizes the style's layout fixes, each another", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  const bool two = world_size() == 2;
  const std::vector<Placement> layouts = {
      RaggedShard(1, two ? std::vector<int64_t>{4, 8} : std::vector<int64_t>{4, 2, 6}),
      IntervalShard(1, two ? std::vector<Intervals>{{{0, 2}, {9, 12}}, {{2, 9}}}
                           : std::vector<Intervals>{{{0, 2}, {9, 12}}, {{2, 3}}, {{3, 9}}})};
  for (const Placement& layout : layouts) {
    CAPTURE(to_string(layout));
    const auto part = [&](const at::Tensor& t) {
      return to_local(distribute_tensor(t.detach(), mesh, {layout}, kNoSource));
    };
    torch::nn::LayerNorm reference(torch::nn::LayerNormOptions({6})), module(torch::nn::LayerNormOptions({6}));
    fill(*reference);
    fill(*module);
    const at::Tensor x = numbers({2, 12, 6});
    at::Tensor want_x = leaf(x), got_x = leaf(part(x));
    const at::Tensor want = reference->forward(want_x), weights = numbers(want.sizes().vec(), 5);
    (want * weights).sum().backward();
    parallelize_module(module, mesh, PartsOfSequence(layout));
    const at::Tensor got = module->forward(got_x);
    REQUIRE(is_dtensor(got));
    CHECK(placements_of(got) == Placements{layout});
    CHECK(difference(got, want) <= kExact);
    (got * distribute_tensor(weights, mesh, {layout})).sum().backward();
    CHECK(difference(got_x.grad(), part(want_x.grad())) <= kExact);
    check_parameters(*module, *reference, /*gradients=*/true, kExact);
  }
}

TESSERA_RANKS_TEST_CASE("a write to a style's plain input before backward throws, as without the style", {1, 2}) {
  torch::nn::Linear module(torch::nn::LinearOptions(6, 4));
  module->to(device());
  auto tp = parallelize_module(module, tp_line(), ColwiseParallel());
  const at::Tensor x = numbers({2, 3, 6}).to(at::kFloat);
  const at::Tensor loss = tp(x).square().sum();
  x.add_(1);
  CHECK_THROWS_WITH(loss.backward(), doctest::Contains("has been modified by an inplace operation"));
  CHECK_NOTHROW(tp(x).square().sum().backward());
}

TESSERA_RANKS_TEST_CASE(
    "activations whose cuts on two mesh dimensions go together alone, or leave no room for the style's", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  const Placement rows = RaggedShard(0, {2, 0, 1, 0}), features = RaggedShard(1, {0, 5});
  const auto check = [&](const Placements& layout, const Style& style) {
    CAPTURE(to_string(layout));
    Linear linear(5, 4), reference(5, 4);
    linear->to(device(), at::kDouble);
    reference->to(device(), at::kDouble);
    {
      const torch::NoGradGuard no_grad;
      for (Linear* each : {&linear, &reference}) {
        (*each)->weight.copy_(on_device(sample({4, 5}, 1)));
        (*each)->bias.copy_(on_device(sample({4}, 2)));
      }
    }
    auto parallel = parallelize_module(linear, mesh, {{"", style}});
    const at::Tensor whole = leaf(on_device(sample({3, 5}))), x = leaf(on_device(sample({3, 5})), mesh, layout);
    const at::Tensor want = reference(whole), got = parallel(x);
    CHECK(close(full_tensor(got.detach()), want.detach(), kExact));
    want.sin().sum().backward();
    got.sin().sum().backward();
    CHECK(close(full_tensor(x.grad()), whole.grad(), kExact));
    CHECK(close(full_tensor(linear->weight.grad()), reference->weight.grad(), kExact));
    CHECK(close(full_tensor(linear->bias.grad()), reference->bias.grad(), kExact));
  };
  check({rows, rows}, ColwiseParallel());
  check({rows, rows}, RowwiseParallel());
  check({Shard(1), Replicate()}, RowwiseParallel({.desired_input_layouts = features}));
  check({rows, rows}, RowwiseParallel({.output_layouts = Shard(0)}));
}

TESSERA_RANKS_TEST_CASE("SequenceParallel over a dimension that the norm needs whole: the result is cut again",
                        {1, 2, 4}) {
  const DeviceMesh mesh = tp_line();
  const at::Tensor x = numbers({3, 8, 12});
  for (const bool local : {true, false}) {
    CAPTURE(local);
    torch::nn::LayerNorm reference(torch::nn::LayerNormOptions({8, 12})), module(torch::nn::LayerNormOptions({8, 12}));
    fill(*reference);
    fill(*module);
    at::Tensor want_x = leaf(x), got_x = leaf(piece(x, 1));
    const at::Tensor want = reference->forward(want_x), weights = numbers(want.sizes().vec(), 5);
    (want * weights).sum().backward();
    parallelize_module(module, mesh, SequenceParallel(1, {.use_local_output = local}));
    const at::Tensor got = module->forward(got_x);
    REQUIRE(is_dtensor(got) == !local);
    if (!local) CHECK(placements_of(got) == Placements{Shard(1)});
    const at::Tensor mine = local ? got : to_local(got);
    CHECK(difference(mine, piece(want, 1)) <= kExact);
    (mine * piece(weights, 1)).sum().backward();
    CHECK(difference(got_x.grad(), piece(want_x.grad(), 1)) <= kExact);
    check_parameters(*module, *reference, /*gradients=*/true, kExact);
  }
}

TESSERA_RANKS_TEST_CASE("activations stay DTensors: layouts and collectives between a colwise and a rowwise Linear",
                        {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  Mlp reference(6, 12, 5), module(6, 12, 5);
  fill(*reference);
  fill(*module);
  auto tp = parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{4, 6}, std::vector<int64_t>{2, 3, 6}}) {
    const at::Tensor x = numbers(shape);
    CommCounter counter(mesh);
    const Strict strict;
    const at::Tensor y = tp(x);
    CHECK(is_dtensor(y));
    CHECK(placements_of(y) == Placements{Replicate()});
    CHECK(counts(counter) == unless_alone("all_reduce 1"));
    CHECK(counter.count_by_path("down.weight") == (world_size() == 1 ? 0 : 1));
    CHECK(difference(y, reference->forward(x)) <= kExact);
  }
}

namespace {

struct BoundaryImpl : torch::nn::Module {
  BoundaryImpl() : inner(register_module("inner", Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    seen = {x, y};
    return inner(x);
  }
  Linear inner;
  std::vector<at::Tensor> seen;
};
TESSERA_MODULE(Boundary);

}  // namespace

TESSERA_RANKS_TEST_CASE("36: Prepare styles annotate plain tensors and redistribute", {1, 2, 3, 4}) {
  const DeviceMesh mesh = tp_line();
  const std::string gathered = unless_alone("all_gather 1");
  for (const int64_t rows : {4 * world_size(), int64_t{7}, int64_t{5}}) {
    CAPTURE(rows);
    const at::Tensor x = numbers({rows, 4});
    Boundary module, reference;
    fill(*reference);
    fill(*module);
    auto tp = parallelize_module(
        module, mesh,
        {{"", PrepareModuleInputOutput({.input = {.input_layouts = {Shard(0), std::nullopt},
                                                  .desired_input_layouts = {Replicate(), std::nullopt}},
                                        .output = {.output_layouts = {Replicate()},
                                                   .desired_output_layouts = {Shard(0)},
                                                   .use_local_output = true}})}});
    const at::Tensor given = cut_input(x, 0);
    CommCounter counter(mesh);
    const at::Tensor y = tp(given, x);
    CHECK(counts(counter) == gathered);  // the output is a local slice
    CHECK(counter.count_by_path("the root module") == (world_size() == 1 ? 0 : 1));
    CHECK(is_dtensor(module->seen.at(0)));
    CHECK_FALSE(is_dtensor(module->seen.at(1)));
    REQUIRE_FALSE(is_dtensor(y));
    CHECK(difference(y, piece(reference->forward(x, x), 0)) <= kExact);
    // A DTensor is not redistributed again.
    counter.reset();
    tp(distribute_tensor(x, mesh, {Shard(0)}, kNoSource), x);
    CHECK(counts(counter) == gathered);
    tp(distribute_tensor(x, mesh, {Replicate()}, kNoSource), x);
    CHECK(counts(counter) == gathered);
  }
}

namespace {

// Runs a Boundary under a Prepare style, forward and backward on 7 rows, and compares with one process. Its input is a
// DTensor laid out as `in`, and the module takes the whole; its result is laid out as `out`.
void run_boundary(const Style& style, const Placement& in, const Placement& out, bool local_input, bool local_output) {
  CAPTURE(style->to_string());
  const DeviceMesh mesh = tp_line();
  const at::Tensor x = numbers({7, 4});
  Boundary module, reference;
  fill(*reference);
  fill(*module);
  auto tp = parallelize_module(module, mesh, {{"", style}});
  const at::Tensor want_x = leaf(x), got_x = leaf(x, mesh, {in});
  const at::Tensor want = reference->forward(want_x, x), weights = numbers(want.sizes().vec(), 5);
  const at::Tensor got = tp(got_x, x);
  CHECK(is_dtensor(module->seen.at(0)) == !local_input);
  CHECK(difference(module->seen.at(0), x) == 0);
  REQUIRE(is_dtensor(got) == !local_output);
  if (!local_output) CHECK(placements_of(got) == Placements{out});
  CHECK(difference(local_output ? got : to_local(got), placed(want, out)) <= kExact);
  (want * weights).sum().backward();
  const at::Tensor mine = local_output ? placed(weights, out) : distribute_tensor(weights, mesh, {out}, kNoSource);
  (got * mine).sum().backward();
  REQUIRE(got_x.grad().defined());
  CHECK(placements_of(got_x.grad()) == Placements{in});
  CHECK(difference(got_x.grad(), want_x.grad()) <= kExact);
  check_parameters(*module, *reference, /*gradients=*/true, kExact);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("Prepare styles on uneven rows: values and gradients, with plain tensors and DTensors",
                        {1, 2, 3}) {
  for (const bool local : {false, true}) {
    CAPTURE(local);
    const PrepareInputOptions input = {.input_layouts = {Shard(0), std::nullopt},
                                       .desired_input_layouts = {Replicate(), std::nullopt},
                                       .use_local_input = local};
    const PrepareOutputOptions output = {
        .output_layouts = {Replicate()}, .desired_output_layouts = {Shard(0)}, .use_local_output = local};
    run_boundary(PrepareModuleInput(input), Shard(0), Replicate(), local, /*local_output=*/false);
    run_boundary(PrepareModuleOutput(output), Replicate(), Shard(0), /*local_input=*/false, local);
    run_boundary(PrepareModuleInputOutput({.input = input, .output = output}), Shard(0), Shard(0), local, local);
  }
}

namespace {

// Sums over the rows that it is given: over those of this rank where it is given a plain piece.
struct CubeSumImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    seen = x;
    return x.pow(3).sum(0).unsqueeze(0);
  }
  at::Tensor seen;
};
TESSERA_MODULE(CubeSum);

struct AfterSumImpl : torch::nn::Module {
  AfterSumImpl() : sums(register_module("sums", CubeSum())), inner(register_module("inner", Linear(4, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return inner(sums(x)); }
  CubeSum sums;
  Linear inner;
};
TORCH_MODULE(AfterSum);

}  // namespace

TESSERA_RANKS_TEST_CASE("a module that is given this rank's rows returns a term of a sum: values and gradients",
                        {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  const at::Tensor x = numbers({7, 4});
  for (const bool local : {false, true}) {
    CAPTURE(local);
    AfterSum module, reference;
    fill(*reference);
    fill(*module);
    auto tp = parallelize_module(
        module, mesh,
        {{"sums",
          PrepareModuleInputOutput(
              {.input = {.input_layouts = {Replicate()}, .desired_input_layouts = {Shard(0)}, .use_local_input = local},
               .output = {.output_layouts = {Partial()}, .desired_output_layouts = {Replicate()}}})}});
    const at::Tensor want_x = leaf(x), got_x = leaf(x);
    const at::Tensor want = reference->forward(want_x), weights = numbers(want.sizes().vec(), 5);
    const at::Tensor got = tp(got_x);
    REQUIRE(is_dtensor(module->sums->seen) == !local);
    CHECK(difference(local ? module->sums->seen : to_local(module->sums->seen), piece(x, 0)) == 0);
    CHECK(difference(got, want) <= kExact);
    (want * weights).sum().backward();
    (got * distribute_tensor(weights, mesh, {Replicate()}, kNoSource)).sum().backward();
    CHECK(difference(got_x.grad(), want_x.grad()) <= kExact);  // the whole, on every rank
    check_parameters(*module, *reference, /*gradients=*/true, kExact);
  }
}

namespace {

using HookedMlpImpl = MlpImpl;
TESSERA_MODULE(HookedMlp);

}  // namespace

TESSERA_RANKS_TEST_CASE("distribute_module: input_fn and output_fn wrap forward, and gradients pass through both",
                        {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  const at::Tensor x = numbers({7, 4});
  HookedMlp module(4, 7, 5), reference(4, 7, 5);
  fill(*reference);
  fill(*module);
  const auto by_features = [](const std::string& path, torch::nn::Module& each, const DeviceMesh& on) {
    auto* const linear = each.as<torch::nn::LinearImpl>();
    if (linear == nullptr) return;
    distribute_in_place(linear->weight, on, {Shard(path == "up" ? 0 : 1)}, kNoSource);
    if (path == "up") distribute_in_place(linear->bias, on, {Shard(0)}, kNoSource);
  };
  const auto input_fn = [](std::vector<at::Tensor>& inputs) {
    inputs.at(0) = redistribute(inputs.at(0), {Replicate()}).tanh();
  };
  const auto output_fn = [](const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
    const at::Tensor y = redistribute(outputs.at(0), {Replicate()}) + inputs.at(0).sum(1, true);
    outputs.at(0) = to_local(redistribute(y.sin(), {Shard(0)}));
  };
  distribute_module(*module, mesh, by_features, {.input_fn = input_fn, .output_fn = output_fn});
  CHECK(module->hooks() == 2);
  const at::Tensor want_x = leaf(x), got_x = leaf(x, mesh, {Shard(0)}), want_input = want_x.tanh();
  const at::Tensor want = (reference->forward(want_input) + want_input.sum(1, true)).sin();
  const at::Tensor weights = numbers(want.sizes().vec(), 5);
  CommCounter counter(mesh);
  const at::Tensor got = module->forward(got_x);
  CHECK((counter.count_by_path("the root module") > 0) == (world_size() > 1));
  REQUIRE_FALSE(is_dtensor(got));
  CHECK(difference(got, piece(want, 0)) <= kExact);
  (want * weights).sum().backward();
  (got * piece(weights, 0)).sum().backward();
  REQUIRE(got_x.grad().defined());
  CHECK(difference(got_x.grad(), want_x.grad()) <= kExact);
  check_parameters(*module, *reference, /*gradients=*/true, kExact);
}

TESSERA_RANKS_TEST_CASE("a user's hook that throws on one rank fails the job with its text", {3}) {
  const DeviceMesh mesh = tp_line();
  Boundary module;
  module->to(device());
  auto tp = parallelize_module(module, mesh, {{"inner", RowwiseParallel({.input_layouts = Replicate()})}});
  module->register_forward_pre_hook([](std::vector<at::Tensor>&) {
    if (rank() == 1) throw std::runtime_error("rank 1 has had enough");
  });
  const at::Tensor x = at::ones({2, 4}, on(at::kFloat));
  std::string message;
  try {
    tp(x, x);
  } catch (const std::exception& error) {
    message = error.what();
  }
  CAPTURE(message);
  CHECK(message.find("rank 1 has had enough") != std::string::npos);
}

TESSERA_RANKS_TEST_CASE("with data dimensions a plain activation is refused, naming from_local", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  Mlp mlp(4, 8, 4);
  mlp->to(device());
  parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  std::string message;
  try {
    const ImplicitReplication guard;
    mlp->forward(at::ones({2, 4}, on(at::kFloat)));
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CAPTURE(message);
  CHECK(message.find("from_local") != std::string::npos);
  CHECK(message.find("up.weight") != std::string::npos);
}

namespace {

// A user's layer that multiplies by an operator of which contracts know nothing.
struct ByMmImpl : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x) { return torch::mm(x, weight.t()); }
};
TORCH_MODULE(ByMm);
// Lays its weight out by columns.
struct ByColumns : ParallelStyle {
  void apply(ApplyContext& context) const override {
    context.place("weight", Shard(0));
    context.contract("weight", {.operators = {"matmul"}, .input = Replicate(), .desired = Replicate(), .output = {}});
  }
  std::string name() const override { return "ByColumns"; }
};
struct HasByMmImpl : torch::nn::Module {
  HasByMmImpl() : up(register_module("up", ByMm(torch::nn::LinearOptions(4, 8).bias(false)))) {}
  at::Tensor forward(const at::Tensor& x) { return up->forward(x); }
  ByMm up;
};
TORCH_MODULE(HasByMm);

}  // namespace

TESSERA_RANKS_TEST_CASE("with data dimensions a plain activation is refused by other products too", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  HasByMm module;
  module->to(device());
  auto tp = parallelize_module(module, mesh, {{"up", ByColumns()}});
  const at::Tensor x = at::ones({2, 4}, on(at::kFloat));
  CHECK_NOTHROW(tp(from_local(x, mesh, {Shard(0), Replicate()})));
  const ImplicitReplication guard;
  CHECK_THROWS_WITH_AS(module->forward(x), doctest::Contains("used with up.weight on the mesh"), std::invalid_argument);
}

namespace {

// A user's norm whose weight multiplies the activation by mul.
struct RmsNormImpl : torch::nn::Module {
  explicit RmsNormImpl(int64_t d) { weight = register_parameter("weight", at::ones({d})); }
  at::Tensor forward(const at::Tensor& x) { return x * (x.square().mean(-1, true) + 1e-6).rsqrt() * weight; }
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

}  // namespace

TESSERA_RANKS_TEST_CASE("SequenceParallel on a norm of the user's own: DTensors go through, plain pieces are refused",
                        {1, 2, 3}) {
  const DeviceMesh mesh = tp_line();
  RmsNorm want(6), got(6);
  fill(*want);
  fill(*got);
  auto tp = parallelize_module(got, mesh, SequenceParallel());
  const at::Tensor x = numbers({2, 5, 6});
  at::Tensor cut = distribute_tensor(x, mesh, {Shard(1)}).detach().set_requires_grad(true);
  const at::Tensor expected = want->forward(x), y = tp(cut);
  CHECK(placements_of(y) == Placements{Shard(1)});
  CHECK(difference(y, expected) <= 1e-12);
  expected.square().sum().backward();
  y.square().sum().backward();
  check_parameters(*got, *want, /*gradients=*/true, 1e-12);
  CHECK_THROWS_WITH_AS(
      tp(x),
      "aten::mul: a plain tensor [2, 5, 6] is used with weight, whose style SequenceParallel says that it is this "
      "rank's piece, S(1); give a DTensor, by from_local(piece, mesh, placements), or by distribute_tensor "
      "where each rank has the whole; or register a constant of the module, such as a mask, as its buffer before "
      "parallelize_module",
      std::invalid_argument);
}

#include "tessera/layers/parallel_linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/relative.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"
#include "tessera/tests/layers/counted.h"
#include "tessera/tests/layers/linear_check.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Case {
  std::string name;
  int64_t in = 12, out = 24;
  int64_t stride = 1;
  bool bias = true;
  bool gather = false;            // for columns
  bool input_is_parallel = true;  // for rows
  bool sequence_parallel = false;
  bool skip_bias_add = false;
  bool lora = false;
  bool allow_uneven = false;
  std::string forward, backward;        // collectives on several ranks
  std::vector<int64_t> batch = {8, 3};  // begins with the sequence
};

ModelParallelConfig config_of(const Case& c) {
  return {.params_dtype = at::kDouble, .sequence_parallel = c.sequence_parallel};
}

template <class Options>
Options options_of(const Case& c) {
  Options options(c.in, c.out);
  options.bias = c.bias;
  options.stride = c.stride;
  options.skip_bias_add = c.skip_bias_add;
  options.allow_uneven = c.allow_uneven;
  if (c.lora) options.lora_rank = 2;
  options.config = config_of(c);
  return options;
}

ColumnParallelOptions columns_of(const Case& c) {
  ColumnParallelOptions options = options_of<ColumnParallelOptions>(c);
  options.gather_output = c.gather;
  return options;
}

RowParallelOptions rows_of(const Case& c) {
  RowParallelOptions options = options_of<RowParallelOptions>(c);
  options.input_is_parallel = c.input_is_parallel;
  return options;
}

LinearRun run_of(const Case& c) { return {.forward = c.forward, .backward = c.backward, .batch = c.batch}; }

}  // namespace

// Each option alone is in the tests of the names that it comes from, tests/coming_from.
TESSERA_RANKS_TEST_CASE("ColumnParallelLinear equals one process, with the collectives that its header states",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const std::string ar = "1 all_reduce", ag = "1 all_gather", both = "1 all_gather, 1 reduce_scatter";
  for (const Case& c : std::vector<Case>{
           {.name = "matrix", .backward = ar, .batch = {5}},
           {.name = "strided, gathered", .stride = 2, .gather = true, .forward = ag, .backward = ar},
           {.name = "bias skipped, gathered",
           .gather = true,
           .skip_bias_add = true,
           .forward = "2 all_gather",
           .backward = ar},
           {.name = "bias skipped in a sequence",
           .sequence_parallel = true,
           .skip_bias_add = true,
           .forward = ag,
           .backward = both,
           .batch = {12, 3}},
           {.name = "uneven", .out = 7, .allow_uneven = true, .backward = ar},
           {.name = "uneven, gathered", .out = 7, .gather = true, .allow_uneven = true, .forward = ag, .backward = ar},
           {.name = "fewer features than ranks", .out = 1, .allow_uneven = true, .backward = ar},
           {.name = "sequence, gathered",
           .gather = true,
           .sequence_parallel = true,
           .forward = "2 all_gather",
           .backward = both,
           .batch = {12, 3}},
           {.name = "adapter", .lora = true, .backward = "2 all_reduce"},
           {.name = "adapter in a sequence",
           .sequence_parallel = true,
           .lora = true,
           .forward = ag,
           .backward = "1 all_reduce, 1 reduce_scatter",
           .batch = {12, 3}},
       }) {
    CAPTURE(c.name);
    check_columns(columns_of(c), mesh, run_of(c));
  }
}

TESSERA_RANKS_TEST_CASE(
    "bias_counted_n_plus_1_times: RowParallelLinear equals one process, with the collectives that its header states",
    {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const std::string ar = "1 all_reduce", ag = "1 all_gather", rs = "1 reduce_scatter";
  for (const Case& c : std::vector<Case>{
           {.name = "uneven", .in = 7, .allow_uneven = true, .forward = ar},
           {.name = "uneven, whole input",
           .in = 7,
           .input_is_parallel = false,
           .allow_uneven = true,
           .forward = ar,
           .backward = ag},
           {.name = "fewer features than ranks", .in = 1, .allow_uneven = true, .forward = ar},
           {.name = "bias skipped in a sequence",
           .sequence_parallel = true,
           .skip_bias_add = true,
           .forward = rs,
           .backward = "1 all_gather, 1 all_reduce",
           .batch = {12, 3}},
           {.name = "sequence without bias",
           .bias = false,
           .sequence_parallel = true,
           .forward = rs,
           .backward = ag,
           .batch = {12, 3}},
           {.name = "adapter", .lora = true, .forward = ar, .backward = ar},
           {.name = "adapter in a sequence",
           .sequence_parallel = true,
           .lora = true,
           .forward = rs,
           .backward = "1 all_gather, 2 all_reduce",
           .batch = {12, 3}},
       }) {
    CAPTURE(c.name);
    check_rows(rows_of(c), mesh, run_of(c));
  }
}

TESSERA_RANKS_TEST_CASE(
    "first values are the same on any number of ranks, and the master weight is in the features' order", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const DeviceMesh alone(World::fake(0, 1), device().type(), Mesh({1}));
  for (const int64_t stride : {0, 1, 2}) {  // 0: uneven
    for (const InitType type : {InitType::kXavierNormal, InitType::kKaimingUniform, InitType::kOrthogonal}) {
      const int64_t features = stride == 0 ? 7 : 24;
      ColumnParallelOptions columns(features, features);
      RowParallelOptions rows(features, features);
      for (ParallelLinearOptions* const each :
           {static_cast<ParallelLinearOptions*>(&columns), static_cast<ParallelLinearOptions*>(&rows)}) {
        each->allow_uneven = stride == 0;
        each->stride = std::max<int64_t>(stride, 1);
        each->init_method = init_method(type);
        each->lora_rank = 5;
      }
      manual_seed(42, mesh.world());
      manual_seed(42, alone.world());
      const ColumnParallelLinear by_columns(columns, mesh), whole_columns(columns, alone);
      const RowParallelLinear by_rows(rows, mesh), whole_rows(rows, alone);
      CHECK(same(by_columns->master_weight(), whole_columns->master_weight()));
      CHECK(same(by_rows->master_weight(), whole_rows->master_weight()));
      for (const auto& [cut, whole] :
           {std::pair<const ParallelLinearBase*, const ParallelLinearBase*>{by_columns.get(), whole_columns.get()},
            {by_rows.get(), whole_rows.get()}}) {
        CHECK(same(full_tensor(cut->lora_a.detach()), full_tensor(whole->lora_a.detach())));
        CHECK(cut->lora_a.abs().max().item<float>() > 0);
        CHECK(same(full_tensor(cut->lora_b.detach()), at::zeros({features, 5}, on(at::kFloat))));
        CHECK(same(cut->master_bias(), at::zeros({features}, on(at::kFloat))));
      }
      CommCounter counter(mesh);
      by_columns->master_weight();
      CHECK(counted(counter) == (mesh.size() > 1 ? "1 all_gather" : ""));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a skipped bias of a DTensor is returned in the output's layout", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 6});
  for (const bool gather : {false, true}) {
    const Case c{.name = "", .in = 6, .out = 12, .gather = gather, .skip_bias_add = true};
    ColumnParallelLinear layer(columns_of(c), mesh);
    stir(*layer);
    const at::Tensor want = at::linear(x, layer->master_weight(), layer->master_bias());
    const LinearOutput global = layer->forward_with_bias(spread(x, mesh, {Replicate()}));
    CHECK(close(full_tensor((global.output + global.bias).detach()), want));
  }
}

TESSERA_RANKS_TEST_CASE("gradient_accumulation_fusion adds to main_grad", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  ColumnParallelOptions options(6, 4 * n);
  options.config = {.params_dtype = at::kDouble, .gradient_accumulation_fusion = true};
  ColumnParallelLinear layer(options, mesh);
  const at::Tensor x = sample({4, 6});
  layer->main_grad = at::ones({4, 6}, on(at::kDouble));
  layer->forward(x).sum().backward();
  CHECK(close(layer->main_grad, x.sum(0).expand({4, 6}) + 1));
  CHECK_FALSE(layer->weight.grad().defined());
  layer->main_grad = at::Tensor();
  {
    const c10::AutoGradMode evaluating(false);
    CHECK(close(layer->forward(x), piece_of(at::linear(x, layer->master_weight()), mesh, {Shard(1)})));
  }
  layer->weight.requires_grad_(false);
  CHECK_NOTHROW(layer->forward(x));

  for (const bool sequence : {false, true}) {
    RowParallelOptions down(4 * n, 5);
    down.input_is_parallel = true;
    down.config = {.params_dtype = at::kDouble, .sequence_parallel = sequence, .gradient_accumulation_fusion = true};
    RowParallelLinear rows(down, mesh);
    const at::Tensor whole = leaf(sample({12, 4 * n})), mine = leaf(piece_of(whole.detach(), mesh, {Shard(1)}));
    const at::Tensor g = sample({12, 5}, 2), weight = leaf(rows->master_weight());
    rows->main_grad = at::ones({5, 4}, on(at::kDouble));
    rows->forward(mine).backward(sequence ? piece_of(g, mesh, {Shard(0)}) : g);
    at::linear(whole, weight).backward(g);
    CHECK(close(rows->main_grad, piece_of(weight.grad(), mesh, {Shard(1)}) + 1));
    CHECK_FALSE(rows->weight.grad().defined());
    CHECK(close(mine.grad(), piece_of(whole.grad(), mesh, {Shard(1)})));
    CHECK(close(full_tensor(rows->bias.grad()), g.sum(0)));
  }
}

TESSERA_RANKS_TEST_CASE("gradient_accumulation_fusion adds to main_grad where the weight is among the inputs asked for",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const bool by_rows : {false, true}) {
    ColumnParallelOptions columns(6, 12);
    RowParallelOptions rows(6, 12);
    rows.input_is_parallel = true;
    columns.config = rows.config = {.params_dtype = at::kDouble, .gradient_accumulation_fusion = true};
    ColumnParallelLinear column(columns, mesh);
    RowParallelLinear row(rows, mesh);
    ParallelLinearBase& layer =
        by_rows ? static_cast<ParallelLinearBase&>(*row) : static_cast<ParallelLinearBase&>(*column);
    const at::Tensor x = leaf(by_rows ? piece_of(sample({4, 6}), mesh, {Shard(1)}) : sample({4, 6}));
    const at::Tensor none = at::zeros_like(to_local(layer.weight.detach()));
    layer.main_grad = none.clone();
    const at::Tensor loss = (by_rows ? row->forward(x) : column->forward(x)).sum();
    torch::autograd::backward({loss}, {}, /*retain_graph=*/true, false, {x, layer.bias});
    CHECK(same(layer.main_grad, none));
    CHECK(x.grad().defined());
    torch::autograd::backward({loss}, {}, /*retain_graph=*/true, false, {layer.weight});
    CHECK(close(layer.main_grad, x.detach().sum(0).expand(none.sizes())));
    CHECK_FALSE(layer.weight.grad().defined());
  }
}

TESSERA_RANKS_TEST_CASE("gradient_accumulation_fusion asks the weight that is used, which may be one given to forward",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 6}), whole = sample({12, 6}, 3);
  const at::Tensor given = spread(whole, mesh, {Shard(0)});
  for (const bool owns : {false, true}) {
    ColumnParallelOptions options(6, 12);
    options.bias = false;
    options.skip_weight_param_allocation = !owns;
    options.config = {.params_dtype = at::kDouble, .gradient_accumulation_fusion = true};
    ColumnParallelLinear layer(options, mesh);
    CHECK(close(layer->forward(x, given), piece_of(at::linear(x, whole), mesh, {Shard(1)})));  // frozen: no main_grad
    if (owns) layer->weight.requires_grad_(false);
    layer->main_grad = at::ones_like(to_local(given));
    const at::Tensor trained = leaf(given);
    layer->forward(x, trained).sum().backward();
    CHECK(close(layer->main_grad, x.sum(0).expand({12 / mesh.size(), 6}) + 1));
    CHECK_FALSE(trained.grad().defined());
  }
}

TESSERA_RANKS_TEST_CASE("two layers of a sequence at once: neither takes what was gathered for the other",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions options(6, 12);
  options.config = {.params_dtype = at::kDouble, .sequence_parallel = true};
  ColumnParallelLinear left(options, mesh), right(options, mesh);
  const at::Tensor whole = leaf(sample({12, 3, 6})), x = leaf(piece_of(whole.detach(), mesh, {Shard(0)}));
  const at::Tensor a = left->forward(x), b = right->forward(x * 2);
  const at::Tensor want_a = at::linear(whole, left->master_weight()),
                   want_b = at::linear(whole * 2, right->master_weight());
  CHECK(close(a.detach(), piece_of(want_a.detach(), mesh, {Shard(2)})));
  CHECK(close(b.detach(), piece_of(want_b.detach(), mesh, {Shard(2)})));
  (a * b).sum().backward();
  (want_a * want_b).sum().backward();
  CHECK(close(x.grad(), piece_of(whole.grad(), mesh, {Shard(0)})));
}

TESSERA_RANKS_TEST_CASE("the whole of a parameter to which this rank's piece was assigned", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const ModelParallelConfig in_double = {.params_dtype = at::kDouble};
  ColumnParallelOptions up(6, 12);
  RowParallelOptions down(12, 5);
  ParallelEmbeddingOptions table(12, 6);
  table.cut = EmbeddingCut::kVocabulary;
  up.config = down.config = table.config = in_double;
  ColumnParallelLinear columns(up, mesh);
  RowParallelLinear rows(down, mesh);
  ParallelEmbedding embedding(table, mesh);
  const at::Tensor tall = sample({12, 6}), wide = sample({5, 12}), bias = sample({12}, 1);
  columns->weight = piece_of(tall, mesh, {Shard(0)});
  columns->bias = piece_of(bias, mesh, {Shard(0)});
  rows->weight = piece_of(wide, mesh, {Shard(1)});
  embedding->weight = piece_of(tall, mesh, {Shard(0)});
  CHECK(same(columns->master_weight(), tall));
  CHECK(same(columns->master_bias(), bias));
  CHECK(same(rows->master_weight(), wide));
  CHECK(same(embedding->master_weight(), tall));
}

TESSERA_RANKS_TEST_CASE("copy_to_region sums the gradient of a norm between layers with sequence_parallel", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions up(6, 8);
  RowParallelOptions down(8, 6);
  down.input_is_parallel = true;
  up.config = down.config = {.params_dtype = at::kDouble, .sequence_parallel = true};
  ColumnParallelLinear first(up, mesh);
  RowParallelLinear second(down, mesh);
  const at::Tensor x = sample({8, 3, 6}), g = sample({8, 3, 6}, 1);
  const at::Tensor weight = leaf(sample({6}, 2)), bias = leaf(sample({6}, 3));
  const at::Tensor normed =
      at::layer_norm(piece_of(x, mesh, {Shard(0)}), {6}, copy_to_region(weight, mesh), copy_to_region(bias, mesh));
  second->forward(first->forward(normed)).backward(piece_of(g, mesh, {Shard(0)}));

  const at::Tensor plain_weight = leaf(sample({6}, 2)), plain_bias = leaf(sample({6}, 3));
  const at::Tensor hidden = at::linear(at::layer_norm(x, {6}, plain_weight, plain_bias), first->master_weight());
  at::linear(hidden, second->master_weight()).backward(g);
  CHECK(close(weight.grad(), plain_weight.grad()));
  CHECK(close(bias.grad(), plain_bias.grad()));
}

TEST_CASE("one_rank_errors: a main_grad, a supplied weight or a piece of a sequence that one rank alone has wrong") {
  const auto check = [](const char* text, const auto& body) {
    for (const std::string& each : thrown(body)) {
      CAPTURE(each);
      CHECK(each.find(text) != std::string::npos);
    }
  };
  check("gradient_accumulation_fusion without main_grad", [](const DeviceMesh& mesh, bool odd) {
    ColumnParallelOptions options(6, 12);
    options.gather_output = options.config.gradient_accumulation_fusion = true;
    ColumnParallelLinear layer(options, mesh);
    if (!odd) layer->main_grad = at::zeros({6, 6}, on(at::kFloat));
    layer->forward(at::ones({4, 6}, on(at::kFloat)));
  });
  check("supplied weight's shape is [5, 6], not [6, 6]", [](const DeviceMesh& mesh, bool odd) {
    ColumnParallelOptions options(6, 12);
    options.skip_weight_param_allocation = options.gather_output = true;
    ColumnParallelLinear(options, mesh)
        ->forward(at::ones({4, 6}, on(at::kFloat)), at::ones({odd ? 5 : 6, 6}, on(at::kFloat)));
  });
  check("input [4, 2, 5]; it has 6 features", [](const DeviceMesh& mesh, bool odd) {
    ColumnParallelOptions options(6, 12);
    options.config.sequence_parallel = true;
    ColumnParallelLinear(options, mesh)->forward(at::ones({4, 2, odd ? 5 : 6}, on(at::kFloat)));
  });
}

TESSERA_RANKS_TEST_CASE("an input of other features is refused alike, and the job goes on", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions columns(6, 12);
  RowParallelOptions rows(12, 6);
  columns.config.params_dtype = rows.config.params_dtype = at::kDouble;
  ColumnParallelLinear column(columns, mesh);
  RowParallelLinear row(rows, mesh);
  CHECK_THROWS_WITH_AS(column->forward(sample({4, 5})),
                       doctest::Contains("ColumnParallelLinear: input [4, 5]; it has 6 features"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(row->forward(sample({4, 5})),
                       doctest::Contains("RowParallelLinear: input [4, 5]; it has 12 features"), std::invalid_argument);
  CHECK(row->forward(full_tensor(column->forward(spread(sample({4, 6}), mesh, {Replicate()})))).sizes() ==
        at::IntArrayRef({4, 6}));
}

TESSERA_RANKS_TEST_CASE("an uneven plain sequence is refused: the next layer could not know of it", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  RowParallelOptions options(12, 6);
  options.input_is_parallel = options.allow_uneven = true;
  options.config = {.params_dtype = at::kDouble, .sequence_parallel = true};
  RowParallelLinear layer(options, mesh);
  const at::Tensor x = sample({2 * mesh.size() + 1, 3, 12});
  CHECK_THROWS_WITH_AS(layer->forward(piece_of(x, mesh, {Shard(2)})), doctest::Contains("dimension 0 of ["),
                       std::invalid_argument);
  CHECK(
      close(full_tensor(layer->forward(spread(x, mesh, {Shard(2)})).detach()), at::linear(x, layer->master_weight())));
}

TESSERA_RANKS_TEST_CASE("under autocast: dtype, values and gradients are those of at::linear, with a bias too",
                        {1, 2, 3}) {
  // bfloat16 has 8 bits. Each rank's term of a sum, the sum and the addition of the bias round to a part in 512.
  constexpr double kRounding = 0.02;
  const DeviceMesh mesh = line();
  manual_seed(42, mesh.world());
  const auto under_autocast = [](const auto& call) {
    at::autocast::set_autocast_dtype(device().type(), at::kBFloat16);
    at::autocast::set_autocast_enabled(device().type(), true);
    at::Tensor result = call();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device().type(), false);
    return result;
  };
  const auto compare = [](const at::Tensor& got, const at::Tensor& want) {
    REQUIRE(got.defined());
    const at::Tensor whole = is_dtensor(got) ? full_tensor(got.detach()) : got.detach();
    CHECK((whole.scalar_type() == want.scalar_type()));
    CHECK(close_to_scale(whole.to(at::kDouble), want.detach().to(at::kDouble), kRounding));
  };
  // The gradient's mean is not 0, so that the terms of the bias's gradient do not cancel.
  const at::Tensor g = (sample({4, 12}, 2) + 0.25).to(at::kBFloat16);
  for (const bool by_rows : {false, true}) {
    for (const bool global : {false, true}) {
      CAPTURE(by_rows);
      CAPTURE(global);
      ColumnParallelLinear column(ColumnParallelOptions(6, 12), mesh);
      RowParallelLinear row(RowParallelOptions(6, 12), mesh);
      ParallelLinearBase& layer =
          by_rows ? static_cast<ParallelLinearBase&>(*row) : static_cast<ParallelLinearBase&>(*column);
      stir(layer);
      const at::Tensor want_x = leaf(sample({4, 6}, 1, at::kFloat));
      const at::Tensor weight = leaf(layer.master_weight()), bias = leaf(layer.master_bias());
      const at::Tensor want = under_autocast([&] { return at::linear(want_x, weight, bias); });
      want.backward(g);
      const Placement cut = by_rows ? Replicate() : Shard(1);
      const at::Tensor x = global ? leaf(want_x.detach(), mesh, {Replicate()}) : leaf(want_x);
      const at::Tensor y = under_autocast([&] { return by_rows ? row->forward(x) : column->forward(x); });
      CHECK((y.scalar_type() == at::kBFloat16));
      REQUIRE(is_dtensor(y) == global);
      y.backward(global ? spread(g, mesh, {cut}) : piece_of(g, mesh, {cut}));
      compare(y, global ? want : piece_of(want, mesh, {cut}));
      compare(x.grad(), want_x.grad());
      compare(layer.weight.grad(), weight.grad());
      compare(layer.bias.grad(), bias.grad());
    }
  }
}

TESSERA_RANKS_TEST_CASE("a sequence has a dimension beside the features", {1, 2}) {
  for (const bool lora : {false, true}) {
    ColumnParallelOptions columns(6, 12);
    RowParallelOptions rows(6, 12);
    rows.input_is_parallel = columns.config.sequence_parallel = rows.config.sequence_parallel = true;
    if (lora) columns.lora_rank = rows.lora_rank = 2;
    CHECK_THROWS_WITH_AS(ColumnParallelLinear(columns, line())->forward(at::ones({6}, on(at::kFloat))),
                         doctest::Contains("it is [sequence, *, features]"), std::invalid_argument);
    CHECK_THROWS_WITH_AS(RowParallelLinear(rows, line())->forward(at::ones({6 / line().size()}, on(at::kFloat))),
                         doctest::Contains("it is [sequence, *, features]"), std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("what a layer cannot be is refused when it is made", {2}) {
  const DeviceMesh mesh = line();
  check_refused([&] { ColumnParallelLinear(ColumnParallelOptions(4, 5), mesh); },
                "ColumnParallelLinear: 5 features are not divisible by 2 ranks");
  check_refused([&] { RowParallelLinear(RowParallelOptions(5, 4), mesh); },
                "RowParallelLinear: 5 features are not divisible by 2 ranks");
  check_refused([&] { ColumnParallelLinear(ColumnParallelOptions(0, 4), mesh); }, "0 input and 4 output features");
  check_refused(
      [&] {
        ColumnParallelOptions options(4, 6);
        options.stride = 2;
        ColumnParallelLinear(options, mesh);
      },
      "6 features are not divisible by 2 ranks with 2 pieces each");
  check_refused(
      [&] {
        RowParallelOptions options(4, 4);
        options.config.sequence_parallel = true;
        RowParallelLinear(options, mesh);
      },
      "to enable sequence_parallel, input_is_parallel must be true");
  check_refused(
      [&] {
        RowParallelOptions options(4, 4);
        options.is_expert = true;
        options.config.expert_model_parallel_size = 2;
        RowParallelLinear(options, mesh);
      },
      "set skip_bias_add");
  check_refused(
      [&] {
        ColumnParallelLinear(ColumnParallelOptions(4, 4), init_device_mesh(device_name(), {2, 1}, {"a", "b"}, world()));
      },
      "mesh[\"name\"]");
}

// Tests Megatron-Core's layers of document 001, with each of their parameters, against one process.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/layers/parallel_attributes.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/layers/sharded_state_dict.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/layers/linear_check.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::string kReduced = "1 all_reduce", kGathered = "1 all_gather", kScattered = "1 reduce_scatter";
const LinearRun kColumns{.forward = "", .backward = kReduced}, kRows{.forward = kReduced, .backward = ""};
const LinearRun kColumnsInSequence{
    .forward = kGathered, .backward = "1 all_gather, 1 reduce_scatter", .batch = {12, 3}};
const LinearRun kRowsInSequence{.forward = kScattered, .backward = "1 all_gather, 1 all_reduce", .batch = {12, 3}};

ColumnParallelOptions columns(int64_t in = 12, int64_t out = 24) {
  ColumnParallelOptions options = ColumnParallelOptions::megatron(in, out);
  options.config = in_double();
  return options;
}

RowParallelOptions rows(int64_t in = 24, int64_t out = 5) {
  RowParallelOptions options(in, out);
  options.input_is_parallel = true;
  options.config = in_double();
  return options;
}

// Returns results and gradients of two layers, by columns and by rows, with the given options.
std::vector<at::Tensor> run_pair(const ColumnParallelOptions& up, const RowParallelOptions& down,
                                 const DeviceMesh& mesh) {
  begin_draws(mesh);
  ColumnParallelLinear first(up, mesh);
  RowParallelLinear second(down, mesh);
  const at::Tensor x = leaf(sample({12, 12}));
  const at::Tensor y = second->forward(first->forward(x));
  y.pow(2).sum().backward();
  return {y.detach(), x.grad(), full_tensor(first->weight.grad()), full_tensor(second->weight.grad())};
}

// Checks that a pair of these options gives, to the bit, what a pair of the usual ones gives.
void check_unchanged(const ColumnParallelOptions& up, const RowParallelOptions& down, const DeviceMesh& mesh) {
  const std::vector<at::Tensor> got = run_pair(up, down, mesh), want = run_pair(columns(), rows(), mesh);
  for (std::size_t i = 0; i < want.size(); ++i) CHECK(same(got[i], want[i]));
}

at::Tensor total(const at::Tensor& term, const DeviceMesh& mesh) {
  return full_tensor(from_local(term, mesh, {Partial()}));
}

// Checks experts, which communicate outside: each rank has its terms of the output and of the input's gradient.
void check_experts(bool sequence, int64_t expert_ranks, const DeviceMesh& mesh) {
  ColumnParallelOptions up = columns(6, 12);
  RowParallelOptions down = rows(12, 5);
  for (ParallelLinearOptions* const each :
       {static_cast<ParallelLinearOptions*>(&up), static_cast<ParallelLinearOptions*>(&down)}) {
    each->is_expert = each->skip_bias_add = true;
    each->config.sequence_parallel = sequence;
    each->config.expert_model_parallel_size = expert_ranks;
  }
  ColumnParallelLinear expert_up(up, mesh);
  RowParallelLinear expert_down(down, mesh);
  const at::Tensor g = sample({4, 5}, 2), whole = leaf(sample({4, 6}));
  const at::Tensor w_up = leaf(expert_up->master_weight()), w_down = leaf(expert_down->master_weight());
  const at::Tensor want = at::linear(at::linear(whole, w_up), w_down);
  want.backward(g);
  for (const bool global : {false, true}) {
    CAPTURE(global);
    expert_up->zero_grad();
    expert_down->zero_grad();
    const at::Tensor tokens = leaf(global ? spread(whole.detach(), mesh, {Replicate()}) : whole.detach());
    CommCounter counter(mesh);
    const at::Tensor hidden = expert_up->forward(tokens), term = expert_down->forward(hidden);
    CHECK(counter.total() == 0);
    if (global && mesh.size() > 1) CHECK(placements_of(term) == Placements{Partial()});
    term.backward(global ? spread(g, mesh, {Replicate()}) : g);
    if (!global) CHECK(counter.total() == 0);
    CHECK(close(global ? full_tensor(term.detach()) : total(term.detach(), mesh), want.detach()));
    CHECK(close(global ? full_tensor(tokens.grad()) : total(tokens.grad(), mesh), whole.grad()));
    CHECK(close(full_tensor(expert_up->weight.grad()), w_up.grad()));
    CHECK(close(full_tensor(expert_down->weight.grad()), w_down.grad()));
  }
}

// Checks that setting an extra state, as another library's checkpoint has one, changes neither values nor parameters.
template <class Layer>
void check_extra_state_is_dropped(Layer& layer, const at::Tensor& x) {
  const at::Tensor before = layer->forward(x).detach();
  const std::size_t count = layer->named_parameters().size() + layer->named_buffers().size();
  layer->set_extra_state(at::ones({2}));
  CHECK_FALSE(layer->get_extra_state().defined());
  CHECK(same(layer->forward(x).detach(), before));
  CHECK(layer->named_parameters().size() + layer->named_buffers().size() == count);
}

// Checks the entries of a weight [out, in], of which rank r has the r-th part along `dim`, under "fc.".
void check_entries(const torch::nn::Module& layer, const std::vector<int64_t>& sizes, int64_t dim,
                   const DeviceMesh& mesh) {
  const auto entry = [&](const ShardedStateDictOptions& options) {
    return sharded_state_dict(layer, "fc.", options).front();
  };
  std::vector<int64_t> offset = {0, 0};
  offset[static_cast<std::size_t>(dim)] = sizes[static_cast<std::size_t>(dim)] / mesh.size() * mesh.local_rank(0);
  const ShardedTensorEntry plain = entry({}), third = entry({.sharded_offsets = {{.offset = 3, .fragments = 8}}});
  CHECK(plain.key == "fc.weight");
  CHECK(sharded_state_dict(layer).front().key == "weight");
  CHECK(plain.global_shape == sizes);
  CHECK(plain.global_offset == offset);
  CHECK(third.global_shape == std::vector<int64_t>{8, sizes[0], sizes[1]});
  CHECK(third.global_offset == std::vector<int64_t>{3, offset[0], offset[1]});
  CHECK(third.prepended == 1);
}

// Checks that each layer draws its weight where `drawn`, else draws nothing; and how the weights lie.
void check_drawn(bool drawn, const ColumnParallelOptions& up, const RowParallelOptions& down, const DeviceMesh& mesh) {
  const auto next = [&] { return full_tensor(tessera::rand({5, 3}, mesh, {Shard(0)})); };
  begin_draws(mesh);
  const at::Tensor first = next();
  const auto check = [&](const auto& make, const Placement& lies) {
    begin_draws(mesh);
    const at::Tensor weight = make();
    CHECK(same(next(), first) != drawn);
    CHECK(placements_of(weight) == Placements{lies});
    CHECK(tensor_parallel_attributes(weight) ==
          tensor_parallel_attributes(spread(sample(weight.sizes()), mesh, {lies})));
  };
  check([&] { return ColumnParallelLinear(up, mesh)->weight; }, Shard(0));
  check([&] { return RowParallelLinear(down, mesh)->weight; }, Shard(1));
  check([&] { return vocab_parallel_embedding(12, 6, mesh, init_method(InitType::kNormal), up.config)->weight; },
        Shard(0));
}

// Checks that a layer's weight begins with the caller's values, and with xavier's where there is no method.
template <class Layer, class Options>
void check_begun(Options options, const DeviceMesh& mesh) {
  const std::vector<int64_t> sizes = {options.output_size, options.input_size};
  begin_draws(mesh);
  CHECK(same(Layer(options, mesh)->master_weight(), first_values(init_method(InitType::kXavierNormal), sizes)));
  options.init_method = quarters();
  CHECK(same(Layer(options, mesh)->master_weight(), at::full(sizes, 0.25, at::kDouble)));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("001 ColumnParallelLinear", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions options = columns();
  const at::Tensor x = sample({4, 12});
  SUBCASE("input_size") {
    for (const int64_t in : {12, 5}) check_columns(columns(in), mesh, kColumns);
  }
  SUBCASE("output_size") {
    for (const int64_t out : {12, 24}) check_columns(columns(12, out), mesh, kColumns);
  }
  SUBCASE("bias") {
    options.bias = false;
    check_columns(options, mesh, kColumns);
  }
  SUBCASE("gather_output") {
    options.gather_output = true;
    check_columns(options, mesh, {.forward = kGathered, .backward = kReduced});
  }
  SUBCASE("init_method") { check_begun<ColumnParallelLinear>(options, mesh); }
  SUBCASE("stride") {
    options.stride = 2;
    check_columns(options, mesh, kColumns);
  }
  SUBCASE("keep_master_weight_for_test") {
    options.stride = 2;
    options.gather_output = true;
    ColumnParallelLinear layer(options, mesh);
    CHECK(close(layer->forward(x).detach(), at::linear(x, layer->master_weight())));
  }
  SUBCASE("skip_bias_add") {
    options.skip_bias_add = true;
    check_columns(options, mesh, kColumns);
    for (const bool gather : {false, true}) {
      options.gather_output = gather;
      ColumnParallelLinear layer(options, mesh);
      stir(*layer);
      const at::Tensor bare = at::linear(x, layer->master_weight());
      CHECK(close(layer->forward(x).detach(), gather ? bare : piece_of(bare, mesh, {Shard(1)})));
      const at::Tensor bias = layer->forward_with_bias(x).bias.detach(), whole = layer->master_bias();
      CHECK(close(bias, gather ? whole : piece_of(whole, mesh, {Shard(0)})));
    }
    options.skip_bias_add = false;
    CHECK_FALSE(ColumnParallelLinear(options, mesh)->forward_with_bias(x).bias.defined());
  }
  SUBCASE("skip_weight_param_allocation") {
    options.skip_weight_param_allocation = true;
    ColumnParallelLinear layer(options, mesh);
    CHECK(layer->named_parameters().keys() == std::vector<std::string>{"bias"});
    CHECK_THROWS_WITH_AS(layer->forward(x), doctest::Contains("weight was not supplied to forward"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(layer->master_weight(), doctest::Contains("no weight of its own"), std::invalid_argument);
  }
  SUBCASE("is_expert") { check_experts(/*sequence=*/true, 1, mesh); }
  SUBCASE("config") {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      options.config.params_dtype = dtype;
      CHECK((ColumnParallelLinear(options, mesh)->weight.scalar_type() == dtype));
    }
  }
  SUBCASE("tp_comm_buffer_name") {  // it has no effect
    options.tp_comm_buffer_name = "fc1";
    check_unchanged(options, rows(), mesh);
  }
  SUBCASE("forward(input, weight)") {
    options.skip_weight_param_allocation = true;
    ColumnParallelLinear layer(options, mesh);
    const at::Tensor whole = sample({24, 12}, 3), tied = leaf(spread(whole, mesh, {Shard(0)}));
    const at::Tensor y = layer->forward(x, tied);
    CHECK(close(y.detach(), piece_of(at::linear(x, whole), mesh, {Shard(1)})));
    y.sum().backward();
    CHECK(close(full_tensor(tied.grad()), x.sum(0).expand({24, 12})));
    CHECK(close(layer->forward(x, piece_of(whole, mesh, {Shard(0)})).detach(), y.detach()));
    CHECK_THROWS_WITH_AS(layer->forward(x, spread(sample({6, 6}), mesh, {Shard(0)})),
                         doctest::Contains("supplied weight is Double [6, 6]"), std::invalid_argument);
    ColumnParallelLinear owner(columns(), mesh);  // the given weight has precedence
    CHECK(close(owner->forward(x, tied).detach(), y.detach()));
  }
  SUBCASE("get_extra_state") { CHECK_FALSE(ColumnParallelLinear(options, mesh)->get_extra_state().defined()); }
  SUBCASE("set_extra_state") {
    ColumnParallelLinear layer(options, mesh);
    check_extra_state_is_dropped(layer, x);
  }
  SUBCASE("sharded_state_dict(prefix, sharded_offsets)") {
    check_entries(*ColumnParallelLinear(options, mesh), {24, 12}, 0, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("001 RowParallelLinear", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  RowParallelOptions options = rows();
  const at::Tensor x = sample({4, 24}), mine = piece_of(x, mesh, {Shard(1)});
  SUBCASE("input_size") {
    for (const int64_t in : {12, 24}) check_rows(rows(in), mesh, kRows);
  }
  SUBCASE("output_size") {
    for (const int64_t out : {5, 8}) check_rows(rows(24, out), mesh, kRows);
  }
  SUBCASE("bias") {
    options.bias = false;
    check_rows(options, mesh, kRows);
  }
  SUBCASE("input_is_parallel") {
    options.input_is_parallel = false;
    check_rows(options, mesh, {.forward = kReduced, .backward = kGathered});
  }
  SUBCASE("init_method") { check_begun<RowParallelLinear>(options, mesh); }
  SUBCASE("stride") {
    options.stride = 2;
    check_rows(options, mesh, kRows);
  }
  SUBCASE("keep_master_weight_for_test") {
    options.stride = 2;
    options.input_is_parallel = false;
    RowParallelLinear layer(options, mesh);
    CHECK(close(layer->forward(x).detach(), at::linear(x, layer->master_weight())));
  }
  SUBCASE("skip_bias_add") {
    options.skip_bias_add = true;
    check_rows(options, mesh, kRows);
    RowParallelLinear layer(options, mesh);
    stir(*layer);
    CHECK(close(layer->forward(mine).detach(), at::linear(x, layer->master_weight())));
    CHECK(same(layer->forward_with_bias(mine).bias.detach(), layer->master_bias()));
  }
  SUBCASE("is_expert") {
    options.is_expert = options.skip_bias_add = options.config.sequence_parallel = true;
    RowParallelLinear layer(options, mesh);
    CommCounter counter(mesh);
    const at::Tensor term = layer->forward(mine).detach();
    CHECK(counter.total() == 0);
    CHECK(close(total(term, mesh), at::linear(x, layer->master_weight())));
  }
  SUBCASE("config") {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      options.config.params_dtype = dtype;
      CHECK((RowParallelLinear(options, mesh)->weight.scalar_type() == dtype));
    }
  }
  SUBCASE("tp_comm_buffer_name") {  // it has no effect
    options.tp_comm_buffer_name = "fc2";
    check_unchanged(columns(), options, mesh);
  }
  SUBCASE("forward") {
    for (const std::vector<int64_t>& batch : std::vector<std::vector<int64_t>>{{5}, {2, 3, 2}}) {
      check_rows(options, mesh, {.forward = kReduced, .backward = "", .batch = batch});
    }
  }
  SUBCASE("get_extra_state") { CHECK_FALSE(RowParallelLinear(options, mesh)->get_extra_state().defined()); }
  SUBCASE("set_extra_state") {
    RowParallelLinear layer(options, mesh);
    check_extra_state_is_dropped(layer, mine);
  }
  SUBCASE("sharded_state_dict(prefix, sharded_offsets)") {
    check_entries(*RowParallelLinear(options, mesh), {5, 24}, 1, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("ModelParallelConfig", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions up = columns();
  RowParallelOptions down = rows();
  SUBCASE("params_dtype") {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      up.config.params_dtype = down.config.params_dtype = dtype;
      CHECK((ColumnParallelLinear(up, mesh)->weight.scalar_type() == dtype));
      CHECK((RowParallelLinear(down, mesh)->bias.scalar_type() == dtype));
      CHECK((vocab_parallel_embedding(12, 6, mesh, quarters(), up.config)->weight.scalar_type() == dtype));
    }
  }
  SUBCASE("perform_initialization") {  // without it nothing is drawn, and parameters lie where they would
    for (const bool perform : {true, false}) {
      CAPTURE(perform);
      up.config.perform_initialization = down.config.perform_initialization = perform;
      check_drawn(perform, up, down, mesh);
    }
  }
  SUBCASE("use_cpu_initialization") {  // it has no effect
    up.config.use_cpu_initialization = down.config.use_cpu_initialization = true;
    check_unchanged(up, down, mesh);
  }
  SUBCASE("sequence_parallel") {
    up.config.sequence_parallel = down.config.sequence_parallel = true;
    check_columns(up, mesh, kColumnsInSequence);
    check_rows(down, mesh, kRowsInSequence);
  }
  SUBCASE("async_tensor_model_parallel_allreduce") {  // it has no effect
    up.config.async_tensor_model_parallel_allreduce = down.config.async_tensor_model_parallel_allreduce = true;
    check_unchanged(up, down, mesh);
  }
  SUBCASE("gradient_accumulation_fusion") {
    up.config.gradient_accumulation_fusion = down.config.gradient_accumulation_fusion = true;
    ColumnParallelLinear first(up, mesh);
    RowParallelLinear second(down, mesh);
    const at::Tensor x = sample({4, 12}), w_up = leaf(first->master_weight()), w_down = leaf(second->master_weight());
    first->main_grad = at::ones_like(to_local(first->weight.detach()));
    second->main_grad = at::ones_like(to_local(second->weight.detach()));
    second->forward(first->forward(x)).pow(2).sum().backward();
    at::linear(at::linear(x, w_up), w_down).pow(2).sum().backward();
    CHECK(close(first->main_grad, piece_of(w_up.grad(), mesh, {Shard(0)}) + 1));
    CHECK(close(second->main_grad, piece_of(w_down.grad(), mesh, {Shard(1)}) + 1));
    CHECK_FALSE(first->weight.grad().defined());
    CHECK_FALSE(second->weight.grad().defined());
  }
  SUBCASE("expert_model_parallel_size") {
    check_experts(/*sequence=*/false, 2, mesh);
    up.is_expert = down.is_expert = true;  // with one expert rank the layers reduce as others do
    check_unchanged(up, down, mesh);
  }
}

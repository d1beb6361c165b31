#include "tessera/tests/layers/linear_check.h"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/layers/counted.h"

namespace tessera::testing {
namespace {

// Computes in one process what the layer computes, from the same parameters.
struct Dense {
  Dense(const ParallelLinearBase& layer, const ParallelLinearOptions& options)
      : weight(leaf(full_tensor(layer.weight.detach()))) {
    CHECK(weight.sizes() == at::IntArrayRef({options.output_size, options.input_size}));
    CHECK(layer.bias.defined() == options.bias);
    CHECK(layer.lora_a.defined() == options.lora_rank.has_value());
    if (options.bias) bias = leaf(full_tensor(layer.bias.detach()));
    if (!options.lora_rank) return;
    a = leaf(full_tensor(layer.lora_a.detach()));
    b = leaf(full_tensor(layer.lora_b.detach()));
    CHECK(a.size(0) == *options.lora_rank);
  }
  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor y = at::linear(x, weight);
    if (a.defined()) y = y + at::linear(at::linear(x, a), b);
    return bias.defined() ? y + bias : y;
  }
  at::Tensor weight, bias, a, b;
};

// Returns the output, with the bias added where the layer skipped it.
template <class Layer>
at::Tensor output_of(Layer& layer, const ParallelLinearOptions& options, const at::Tensor& x) {
  if (!options.skip_bias_add) return layer->forward(x);
  const LinearOutput out = layer->forward_with_bias(x);
  return out.output + out.bias;
}

void check_gradients(const ParallelLinearBase& layer, const Dense& dense) {
  const auto check = [](const at::Tensor& sharded, const at::Tensor& whole) {
    if (!whole.defined()) return;
    REQUIRE(sharded.grad().defined());
    CHECK(placements_of(sharded.grad()) == placements_of(sharded));
    CHECK(close(full_tensor(sharded.grad()), whole.grad()));
  };
  check(layer.weight, dense.weight);
  check(layer.bias, dense.bias);
  check(layer.lora_a, dense.a);
  check(layer.lora_b, dense.b);
}

void check_collectives(const CommCounter& counter, const std::string& wanted, const DeviceMesh& mesh) {
  if (mesh.size() > 1) CHECK(counted(counter) == wanted);
  if (mesh.size() == 1) CHECK(counter.total() == 0);
}

// Runs a layer of these options on this rank's piece of an input; `in` and `out` are the layouts of input and output.
// The input is a DTensor where `global`.
template <class Layer>
void check_layer(Layer layer, const ParallelLinearOptions& options, const LinearRun& run, const Placement& in,
                 const Placement& out, bool global) {
  CAPTURE(global);
  const DeviceMesh mesh = layer->mesh();
  stir(*layer);
  const Dense dense(*layer, options);
  std::vector<int64_t> sizes = run.batch;
  sizes.push_back(options.input_size);
  const at::Tensor whole_x = leaf(sample(sizes, 1));
  const at::Tensor x =
      global ? leaf(spread(whole_x.detach(), mesh, {in})) : leaf(piece_of(whole_x.detach(), mesh, {in}));
  const at::Tensor want = dense.forward(whole_x);
  const at::Tensor g = sample(want.sizes(), 2);
  CommCounter counter(mesh);
  const at::Tensor y = output_of(layer, options, x);
  check_collectives(counter, run.forward, mesh);
  CHECK(is_dtensor(y) == global);
  if (global) CHECK(placements_of(y) == Placements{out});
  CHECK(close(global ? full_tensor(y.detach()) : y.detach(),
              global ? want.detach() : piece_of(want.detach(), mesh, {out})));
  want.backward(g);
  counter.reset();
  y.backward(global ? spread(g, mesh, {out}) : piece_of(g, mesh, {out}));
  check_collectives(counter, run.backward, mesh);
  const at::Tensor gradient = global ? full_tensor(x.grad()) : x.grad();
  CHECK(close(gradient, global ? whole_x.grad() : piece_of(whole_x.grad(), mesh, {in})));
  check_gradients(*layer, dense);
}

// Returns the layout of a tensor whose last dimension, of `features`, lies as the layer's weight does.
Placement features_cut(const LinearRun& run, int64_t features, int64_t stride, const DeviceMesh& mesh) {
  const auto last = static_cast<int64_t>(run.batch.size());
  return stride == 1 ? Shard(last) : BlockCyclic(last, features / mesh.size() / stride);
}

}  // namespace

void stir(const ParallelLinearBase& layer) {
  const c10::AutoGradMode none(false);
  for (const at::Tensor& t : {layer.bias, layer.lora_b}) {
    if (t.defined()) at::Tensor(t).uniform_(-1, 1);
  }
}

void check_columns(const ColumnParallelOptions& options, const DeviceMesh& mesh, const LinearRun& run) {
  for (const bool global : {false, true}) {
    const Placement cut = features_cut(run, options.output_size, options.stride, mesh);
    check_layer(ColumnParallelLinear(options, mesh), options, run,
                options.config.sequence_parallel ? Shard(0) : Replicate(), options.gather_output ? Replicate() : cut,
                global);
  }
}

void check_rows(const RowParallelOptions& options, const DeviceMesh& mesh, const LinearRun& run) {
  for (const bool global : {false, true}) {
    const Placement cut = features_cut(run, options.input_size, options.stride, mesh);
    check_layer(RowParallelLinear(options, mesh), options, run, options.input_is_parallel ? cut : Replicate(),
                options.config.sequence_parallel ? Shard(0) : Replicate(), global);
  }
}

}  // namespace tessera::testing

// Runs unmodified modules of torch::nn on DTensors, and compares results, gradients of inputs and parameters, and
// buffers with the same module in one process. Each row runs on every layout of its inputs, with its parameters
// replicated, sharded and plain.

#include <mutex>
#include <optional>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/everyday/outcome.h"
#include "tessera/tests/modules/row.h"

namespace tessera::testing {
namespace {

struct Column {
  const char* name;
  std::vector<int64_t> mesh_shape;
  Placements inputs;
};

// With six or five elements in a dimension, some rank has none, or another number than the others.
std::vector<Column> columns_of_table() {
  return {{"S(0) of 1", {1}, {Shard(0)}},
          {"R", {2}, {Replicate()}},
          {"S(0)", {4}, {Shard(0)}},
          {"S(1)", {3}, {Shard(1)}},
          {"Ragged(0)", {3}, {RaggedShard(0, {5, 0, 1})}},
          {"[S(0), S(1)]", {2, 2}, {Shard(0), Shard(1)}}};
}

// Parameters are replicated, sharded, and plain: under ImplicitReplication plain ones count as replicated.
std::vector<std::optional<Placement>> parameters_of_table() { return {Replicate(), Shard(0), std::nullopt}; }

// Returns the table's layouts and, for layers that take images, those that shard spatial dimensions.
std::vector<Column> columns_of_images(const Input& input) {
  std::vector<Column> out = columns_of_table();
  if (input.value.dim() >= 3) out.push_back({"S(2)", {3}, {Shard(2)}});
  if (input.value.dim() >= 4) out.push_back({"[S(2), S(3)]", {2, 2}, {Shard(2), Shard(3)}});
  return out;
}

// Replaces a shard of a dimension that the tensor does not have by Replicate.
Placements fitting(Placements placements, const at::Tensor& t) {
  for (Placement& p : placements) {
    if (!p.is_shard()) continue;
    if (p.tensor_dim() >= t.dim()) {
      p = Replicate();
    } else if (!p.is_chunks()) {
      p = RaggedShard(p.tensor_dim(), {t.size(0) - 1, 0, 1});
    }
  }
  return placements;
}

// The values do not depend on a generator: ranks are threads, which would share it.
void set_up(const Subject& subject, const ModuleRow& row) {
  const at::NoGradGuard no_grad;
  subject.module->to(at::kDouble);
  subject.module->train(!row.eval);
  double seed = 0.3;
  for (at::Tensor& p : subject.module->parameters()) p.copy_(waves(p.sizes(), seed += 1) * 0.5);
}

// Returns the weighted sum of differentiable results, and its gradients: the inputs', then the parameters'.
Outcome outcome(const Subject& subject, const Tensors& inputs) {
  Outcome out{.results = subject.run(inputs), .grads = {}, .collectives = {}};
  if (const at::Tensor loss = loss_of(out.results); loss.defined()) {
    loss.backward();
    for (const at::Tensor& t : inputs) out.grads.push_back(whole_of(t.grad()));
    for (const at::Tensor& p : subject.module->parameters()) out.grads.push_back(whole_of(p.grad()));
  }
  for (const at::Tensor& buffer : subject.module->buffers()) out.results.push_back(buffer);
  for (at::Tensor& t : out.results) t = t.defined() ? whole_of(t.detach()).clone() : t;
  return out;
}

Outcome run_plain(const ModuleRow& row) {
  const Subject subject = row.make();
  set_up(subject, row);
  Tensors inputs;
  for (const Input& input : subject.inputs) inputs.push_back(input.value.detach().clone().requires_grad_(input.grad));
  return outcome(subject, inputs);
}

// Parameters without a placement stay plain.
Outcome run_rank(const ModuleRow& row, const DeviceMesh& mesh, const Placements& placements,
                 const std::optional<Placement>& parameters) {
  const Subject subject = row.make();
  set_up(subject, row);
  const Placements replicated(static_cast<std::size_t>(mesh.ndim()), Replicate());
  Placements of_parameters = replicated;
  if (parameters) of_parameters.back() = *parameters;
  for (const at::Tensor& p : parameters ? subject.module->parameters() : Tensors())
    distribute_in_place(p, mesh, fitting(of_parameters, p), kNoSource);
  for (const at::Tensor& b : subject.module->buffers()) distribute_in_place(b, mesh, replicated, kNoSource);
  Tensors inputs;
  for (const Input& input : subject.inputs) {
    at::Tensor t = input.value.detach().clone();
    if (input.as == Input::As::kSpread) t = distribute_tensor(t, mesh, fitting(placements, t), kNoSource).detach();
    if (input.as == Input::As::kWhole) t = distribute_tensor(t, mesh, replicated, kNoSource).detach();
    inputs.push_back(t.requires_grad_(input.grad));
  }
  manual_seed(3, mesh.world());
  const ImplicitReplication guard;
  const Checked compared(mesh, Checked::enabled(mesh.world()) && !row.draws_plain);
  return outcome(subject, inputs);
}

Outcome run_alone(const ModuleRow& row) {
  Outcome out;
  run_in_process(1, [&](const std::shared_ptr<World>& world) {
    out = run_rank(row, init_device_mesh("cpu", {1}, {}, world), {Replicate()}, Replicate());
  });
  return out;
}

// Returns what is wrong; "" for nothing.
std::string check_column(const ModuleRow& row, const Column& column, const std::optional<Placement>& parameters,
                         const Outcome& wanted) {
  std::mutex mutex;
  std::string wrong;
  try {
    run_in_process(c10::multiply_integers(column.mesh_shape), [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", column.mesh_shape, {}, world);
      const std::string text = compare(run_rank(row, mesh, column.inputs, parameters), wanted);
      const std::lock_guard lock(mutex);
      if (!text.empty()) wrong = text;
    });
  } catch (const std::exception& error) {
    wrong = message(error).substr(0, 300);
  }
  return wrong;
}

void check(const std::vector<ModuleRow>& rows, bool images = false) {
  for (const ModuleRow& row : rows) {
    const Outcome wanted = row.draws ? run_alone(row) : run_plain(row);
    for (const Column& column : images ? columns_of_images(row.make().inputs.at(0)) : columns_of_table()) {
      for (const std::optional<Placement>& parameters : parameters_of_table()) {
        const std::string wrong = check_column(row, column, parameters, wanted);
        CHECK_MESSAGE(wrong.empty(), fmt::format("ROW {} | {} | parameters {} | {}", row.name, column.name,
                                                 parameters ? to_string(*parameters) : "plain", wrong));
      }
    }
  }
}

TEST_CASE("linear layers, convolutions, paddings, embeddings and dropouts") { check(layer_rows(), /*images=*/true); }
TEST_CASE("poolings") { check(pooling_rows(), /*images=*/true); }
TEST_CASE("recurrent modules, with and without initial states") { check(recurrent_rows()); }
TEST_CASE("attention and transformers") { check(attention_rows()); }
TEST_CASE("norms") { check(norm_rows()); }
TEST_CASE("activations") { check(activation_rows()); }
TEST_CASE("losses") { check(loss_rows()); }
TEST_CASE("the table has at least 230 rows") {
  std::size_t count = 0;
  for (const auto rows :
       {layer_rows, pooling_rows, recurrent_rows, attention_rows, norm_rows, activation_rows, loss_rows}) {
    count += rows().size();
  }
  CHECK(count >= 230);
}

}  // namespace
}  // namespace tessera::testing

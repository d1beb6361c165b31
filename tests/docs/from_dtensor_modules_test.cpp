// Holds the code of docs/coming-from-dtensor.md on modules, inspection and checkpoints: the case of a name of PyTorch's
// holds the code of its row, and docs_test compares them. Ranks are threads.

#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/inspect/visualize.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/ops/rules/rule.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/distribute_module.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/from_dtensor.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using namespace from_dtensor;

// Returns the layout in which `style` leaves the output of torch::nn::Linear(16, 64) for a batch that dp cuts.
tessera::Placements output_layout(const tessera::DeviceMesh& mesh, const tessera::Style& style) {
  torch::nn::Linear linear(16, 64);
  const at::Tensor x = tessera::from_local(torch::ones({2, 3, 16}), mesh, {S0, R});
  return tessera::placements_of(tessera::parallelize_module(linear, mesh, style)(x));
}

// A container whose forward can be hooked.
struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * 2; }
};
TESSERA_MODULE(Block);

// Returns the layout of a block's result for an input that tp cuts along dimension 1.
tessera::Placements block_layout(const tessera::DeviceMesh& mesh, const tessera::Style& style) {
  Block block;
  const at::Tensor x = tessera::distribute_tensor(numbers(), mesh, {S0, S1});
  return tessera::placements_of(tessera::parallelize_module(block, mesh, style)(x));
}

using Trained = std::function<void(Mlp& model, torch::optim::Adam& optimizer, const std::string& folder)>;

// Runs `body` on four ranks, each with an MLP on the mesh, its optimizer after one step, and a folder for all.
void trained(const Trained& body) {
  const tessera::PrivateFolder folder;
  on_mesh([&](const tessera::DeviceMesh& mesh) {
    Mlp model;
    auto tp = tessera::parallelize_module(model, mesh,
                                          {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
    torch::optim::Adam optimizer(model->parameters(), 0.1);
    tp(tessera::from_local(torch::ones({2, 16}), mesh, {S0, R})).square().mean().backward();
    optimizer.step();
    body(model, optimizer, folder.path());
  });
}

at::Tensor weight_of(const Mlp& model) { return tessera::full_tensor(model->up->weight.detach()); }

// Returns Adam's running average of the gradient of that weight.
at::Tensor average_of(torch::optim::Adam& optimizer, const Mlp& model) {
  const auto& state = optimizer.state().at(model->up->weight.unsafeGetTensorImpl());
  return tessera::full_tensor(static_cast<const torch::optim::AdamParamState&>(*state).exp_avg().clone());
}

void forget(const Mlp& model) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : model->parameters()) parameter.zero_();
}

}  // namespace

TEST_CASE("distribute_module") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    Mlp model;
    const auto partition_fn = [](const std::string& path, torch::nn::Module& module, const tessera::DeviceMesh& on) {
      if (path == "up") tessera::distribute_in_place(module.named_parameters()["weight"], on, {R, S0});
    };
    tessera::distribute_module(*model, mesh, partition_fn);
    CHECK(tessera::placements_of(model->up->weight) == tessera::Placements{R, S0});
    CHECK(tessera::placements_of(model->down->weight) == tessera::Placements{R, R});
  });
}

// ---- torch.distributed.tensor.parallel

TEST_CASE("parallelize_module") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    Mlp model;
    auto tp = tessera::parallelize_module(model, mesh,
                                          {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
    const at::Tensor x = tessera::from_local(torch::ones({2, 16}), mesh, {S0, R});
    CHECK(tessera::placements_of(tp(x)) == tessera::Placements{S0, R});
    CHECK(tessera::placements_of(model->up->weight) == tessera::Placements{R, S0});
  });
}

TEST_CASE("ColwiseParallel") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    CHECK(output_layout(mesh, tessera::ColwiseParallel()) == tessera::Placements{S0, tessera::Shard(2)});
    CHECK(output_layout(mesh, tessera::ColwiseParallel({.output_layouts = R})) == tessera::Placements{S0, R});
  });
}

TEST_CASE("RowwiseParallel") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    CHECK(output_layout(mesh, tessera::RowwiseParallel()) == tessera::Placements{S0, R});
    CHECK(output_layout(mesh, tessera::RowwiseParallel({.output_layouts = S1})) == tessera::Placements{S0, S1});
  });
}

TEST_CASE("SequenceParallel") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({6}));
    auto parallel = tessera::parallelize_module(norm, mesh, tessera::SequenceParallel(1));
    const at::Tensor x = tessera::from_local(torch::ones({2, 4, 6}), mesh, {S0, R});
    CHECK(tessera::placements_of(parallel(x)) == tessera::Placements{S0, S1});
  });
}

TEST_CASE("PrepareModuleInput") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const auto style = tessera::PrepareModuleInput({.input_layouts = {S1}, .desired_input_layouts = {R}});
    CHECK(block_layout(mesh, style) == tessera::Placements{S0, R});
  });
}

TEST_CASE("PrepareModuleOutput") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const auto style = tessera::PrepareModuleOutput({.output_layouts = {S1}, .desired_output_layouts = {R}});
    CHECK(block_layout(mesh, style) == tessera::Placements{S0, R});
  });
}

TEST_CASE("PrepareModuleInputOutput") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const auto style = tessera::PrepareModuleInputOutput({
        .input = {.input_layouts = {S1}, .desired_input_layouts = {R}},
        .output = {.output_layouts = {R}, .desired_output_layouts = {S0}},
    });
    CHECK(block_layout(mesh, style) == tessera::Placements{S0, S0});
  });
}

TEST_CASE("ParallelStyle") {
  class ReplicateAll : public tessera::ParallelStyle {
   public:
    void apply(tessera::ApplyContext& context) const override {
      for (const tessera::NamedTensor& item : context.tensors()) context.place(item.name, tessera::Replicate());
    }
    std::string name() const override { return "ReplicateAll"; }
  };
  on_mesh([](const tessera::DeviceMesh& mesh) {
    Mlp model;
    const tessera::ParallelPlan plan = {{"up", ReplicateAll()}};
    tessera::parallelize_module(model, mesh, plan);
    CHECK(tessera::placements_of(model->up->weight) == tessera::Placements{R, R});
  });
}

TEST_CASE("loss_parallel") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor logits = tessera::distribute_tensor(numbers(), mesh, {S0, S1});
    const at::Tensor target = tessera::distribute_tensor(torch::arange(4), mesh, {S0, R});
    const tessera::CommCounter counter(mesh);
    const at::Tensor loss = torch::cross_entropy_loss(logits, target);
    CHECK(counter.count("all_gather") == 0);
    const at::Tensor want = torch::cross_entropy_loss(numbers(), torch::arange(4));
    CHECK(torch::allclose(tessera::full_tensor(loss), want));
  });
}

// ---- torch.distributed.tensor.experimental and .debug

TEST_CASE("implicit_replication") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::distribute_tensor(numbers(), mesh, {S0, R});
    const tessera::ImplicitReplication guard;
    CHECK(torch::equal(tessera::full_tensor(t + torch::ones({6})), numbers() + 1));
  });
}

TEST_CASE("local_map") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::distribute_tensor(numbers(), mesh, {R, R}).requires_grad_();
    const auto kernel = [](const at::Tensor& piece) { return piece * 3; };
    const tessera::Placements in = {S0, S1};
    const at::Tensor piece = tessera::to_local(tessera::redistribute(t, in));
    const at::Tensor out = tessera::from_local(kernel(piece), mesh, in);
    CHECK(torch::equal(tessera::full_tensor(out.detach()), numbers() * 3));
    out.sum().backward();
    CHECK(torch::equal(tessera::full_tensor(t.grad()), torch::full({4, 6}, 3.0)));
  });
}

namespace {

TORCH_LIBRARY(mylib, m) { m.def("scale(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(mylib, CPU, m) {
  m.impl("scale", [](const at::Tensor& x) { return x * 2; });
}
TORCH_LIBRARY_IMPL(mylib, Meta, m) {
  m.impl("scale", [](const at::Tensor& x) { return at::empty_like(x); });
}

at::Tensor scale(const at::Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mylib::scale", "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

}  // namespace

TEST_CASE("register_sharding") {
  const auto rule = [](const tessera::rules::OpCall&) -> tessera::rules::OpRule {
    return {.strategies = tessera::rules::shard_factors({"nm"}, {"nm"})};
  };
  tessera::rules::register_rule("mylib::scale", rule);
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::distribute_tensor(numbers(), mesh, {S0, S1});
    const tessera::CommCounter counter(mesh);
    const at::Tensor scaled = scale(t);
    CHECK(counter.total() == 0);
    CHECK(tessera::placements_of(scaled) == tessera::Placements{S0, S1});
    CHECK(torch::equal(tessera::full_tensor(scaled), numbers() * 2));
  });
}

TEST_CASE("CommDebugMode") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::distribute_tensor(numbers(), mesh, {S0, R});
    const tessera::CommCounter counter(mesh);
    tessera::full_tensor(t);
    CHECK(counter.total() == 1);
  });
}

namespace {

// Counts what gathering a tensor that dp cuts communicates.
void counted(const std::function<void(const tessera::CommCounter& counter)>& body) {
  on_mesh([&](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::distribute_tensor(numbers(), mesh, {S0, R});
    const tessera::CommCounter counter(mesh);
    tessera::full_tensor(t);
    body(counter);
  });
}

}  // namespace

TEST_CASE("CommDebugMode.get_total_counts") {
  counted([](const tessera::CommCounter& counter) { CHECK(counter.total() == 1); });
}

TEST_CASE("CommDebugMode.get_comm_counts") {
  counted([](const tessera::CommCounter& counter) { CHECK(counter.count("all_gather") == 1); });
}

TEST_CASE("CommDebugMode.generate_comm_debug_tracing_table") {
  counted([](const tessera::CommCounter& counter) {
    CHECK(counter.to_string().find("all_gather  dp") != std::string::npos);
  });
}

TEST_CASE("CommDebugMode.generate_json_dump") {
  counted([](const tessera::CommCounter& counter) { CHECK(counter.records().at(0).bytes == 48); });
}

TEST_CASE("CommDebugMode.get_parameter_info") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string&) {
    CHECK(tessera::to_string(tessera::describe(*model)).find("[R, S(0)]") != std::string::npos);
  });
}

TEST_CASE("visualize_sharding") {
  on_mesh([](const tessera::DeviceMesh& mesh) {
    const at::Tensor t = tessera::distribute_tensor(numbers(), mesh, {S0, R});
    CHECK(tessera::visualize(t) ==
          "[4, 6] on {dp: 2, tp: 2} as [S(0), R]\n"
          "rows are tensor dimension 0, columns tensor dimension 1\n"
          "      0-6\n"
          "    +------+\n"
          "0-2 | 0, 1 |\n"
          "    +------+\n"
          "2-4 | 2, 3 |\n"
          "    +------+\n");
  });
}

// ---- torch.distributed.checkpoint

TEST_CASE("save") {
  trained([](Mlp& model, torch::optim::Adam& optimizer, const std::string& folder) {
    tessera::save_weights(*model, folder);
    tessera::save_optimizer(optimizer, *model, folder + "/optimizer.safetensors");
    CHECK(tessera::Checkpoint(folder).tensors().size() == 4);
  });
}

TEST_CASE("load") {
  trained([](Mlp& model, torch::optim::Adam& optimizer, const std::string& folder) {
    const at::Tensor weight = weight_of(model), average = average_of(optimizer, model);
    tessera::save_weights(*model, folder);
    tessera::save_optimizer(optimizer, *model, folder + "/optimizer.safetensors");
    forget(model);
    optimizer.state().clear();
    optimizer.param_groups().at(0).options().set_lr(7);
    tessera::load_weights(*model, folder);
    tessera::load_optimizer(optimizer, *model, folder + "/optimizer.safetensors");
    CHECK(torch::equal(weight_of(model), weight));
    CHECK(optimizer.param_groups().at(0).options().get_lr() == 0.1);
    CHECK(torch::equal(average_of(optimizer, model), average));
    CHECK(average.abs().sum().item<double>() > 0);
  });
}

TEST_CASE("HuggingFaceStorageWriter") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string& folder) {
    tessera::save_weights(*model, folder, {.max_shard_bytes = 5000});
    CHECK(tessera::Checkpoint(folder).tensors().size() == 4);
  });
}

TEST_CASE("HuggingFaceStorageReader") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string& folder) {
    const at::Tensor weight = weight_of(model);
    torch::nn::Sequential saved(model);  // whose names begin with "0."
    tessera::save_weights(*saved, folder, {.max_shard_bytes = 5000});
    forget(model);
    const auto rename = [](const std::string& name) { return "0." + name; };
    tessera::load_weights(*model, folder, {.rename = rename});
    CHECK(torch::equal(weight_of(model), weight));
  });
}

TEST_CASE("DefaultLoadPlanner") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string& folder) {
    tessera::save_weights(*model->up, folder);
    const at::Tensor weight = weight_of(model);
    forget(model);
    const auto rename = [](const std::string& name) { return name.starts_with("up.") ? name.substr(3) : name; };
    tessera::load_weights(*model, folder, {.rename = rename, .allow_missing = {"down.*"}});
    CHECK(torch::equal(weight_of(model), weight));
  });
}

TEST_CASE("CheckpointException") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string& folder) {
    CHECK_THROWS_AS(tessera::load_weights(*model, folder + "/none"), std::exception);
  });
}

TEST_CASE("Metadata") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string& folder) {
    tessera::save_weights(*model, folder);
    const tessera::Checkpoint checkpoint(folder);
    CHECK(checkpoint.find("up.weight")->shape == std::vector<int64_t>{64, 16});
  });
}

TEST_CASE("get_model_state_dict") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string&) {
    const at::Tensor whole = tessera::full_tensor(model->named_parameters()["up.weight"]);
    CHECK_FALSE(tessera::is_dtensor(whole));
    CHECK(whole.sizes() == at::IntArrayRef({64, 16}));
  });
}

TEST_CASE("set_model_state_dict") {
  trained([](Mlp& model, torch::optim::Adam&, const std::string&) {
    const at::Tensor whole = torch::full({64, 16}, 2.0), parameter = model->up->weight;
    const torch::NoGradGuard no_grad;
    parameter.copy_(tessera::distribute_tensor(whole, tessera::mesh_of(parameter), tessera::placements_of(parameter)));
    CHECK(torch::equal(weight_of(model), whole));
  });
}

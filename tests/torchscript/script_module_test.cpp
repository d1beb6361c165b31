// Compares TorchScript modules under plans with the same modules in one process.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/optim/adam.h>
#include <torch/script.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/script_module.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/dtensor/whole_value.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

torch::jit::Module load(const std::string& name) {
  return torch::jit::load(std::string("tests/torchscript/") + name + ".pt");
}

// Returns the largest difference, of the largest magnitude of `want` or of 1e-3: some gradients are zero but for
// rounding, such as that of the bias of an attention's keys.
double scaled_difference(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor have = whole_value(got);
  if (have.sizes() != want.sizes()) return 1e300;
  return ((have - want).abs().max() / want.abs().max().clamp_min(1e-3)).item<double>();
}

const ParallelPlan kMlp = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
const ParallelPlan kModel = {{"tok", RowwiseParallel()},
                             {"layers.*.attn.w[qkv]", ColwiseParallel()},
                             {"layers.*.attn.wo", RowwiseParallel()},
                             {"layers.*.up", ColwiseParallel()},
                             {"layers.*.down", RowwiseParallel()},
                             {"head", ColwiseParallel()}};

const ParallelPlan kAttends = {{"attention", ColwiseParallel()}};
const ParallelPlan kEncodes = {{"encoder.layers.*.self_attn", ColwiseParallel()},
                               {"encoder.layers.*.linear1", ColwiseParallel()},
                               {"encoder.layers.*.linear2", RowwiseParallel()}};
const ParallelPlan kConv1D = {{"c_fc", ColwiseParallel()}, {"c_proj", RowwiseParallel()}};

struct Row {
  std::string name;
  ParallelPlan plan;
  at::Tensor input;
};

// Torch's generator belongs to the process, so inputs are made before ranks start.
std::vector<Row> rows() {
  torch::manual_seed(5);
  const at::Tensor x = torch::randn({5, 10}, torch::kDouble), ids = torch::arange(10).remainder(13).view({2, 5});
  const at::Tensor sequences = torch::randn({5, 3, 12}, torch::kDouble);
  return {{"mlp", kMlp, x},
          {"traced", kMlp, x},
          {"model", kModel, ids},
          {"model", {}, ids},
          {"attends", kAttends, sequences},
          {"attends_without_bias", kAttends, sequences},
          {"attends_in_eval", kAttends, sequences},
          {"attends_padded_in_eval", kAttends, sequences},
          {"attends_causal_in_eval", kAttends, sequences},
          {"attends_traced", kAttends, sequences},
          {"attends_traced_without_weights", kAttends, sequences},
          {"encodes_in_eval", kEncodes, sequences},
          {"encodes_norm_first_in_eval", kEncodes, sequences},
          {"conv1d", kConv1D, sequences}};
}

// Makes four calls, forward and backward: the first is profiled, later ones run code specialized for its arguments.
void check_calls(const Row& row, const DeviceMesh& mesh, const ParallelizeOptions& options) {
  CAPTURE(row.name);
  torch::jit::Module reference = load(row.name), module = load(row.name);
  auto tp = parallelize_module(module, mesh, row.plan, options);
  const bool floating = row.input.is_floating_point();
  for (int call = 1; call <= 4; ++call) {
    CAPTURE(call);
    const at::Tensor plain = row.input.detach().clone().set_requires_grad(floating);
    const at::Tensor mine =
        distribute_tensor(row.input, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()), kNoSource)
            .detach()
            .set_requires_grad(floating);
    const at::Tensor want = reference.forward({plain}).toTensor(), got = tp(mine).toTensor();
    CHECK(is_dtensor(got));
    CHECK(scaled_difference(got, want) <= 1e-12);
    want.square().mean().backward();
    got.square().mean().backward();
    if (floating) CHECK(scaled_difference(mine.grad(), plain.grad()) <= 1e-12);
    const auto wanted = reference.named_parameters();
    auto expected = wanted.begin();
    for (const auto& item : module.named_parameters()) {
      CAPTURE(item.name);
      CHECK(scaled_difference(item.value.grad(), (*expected).value.grad()) <= 1e-12);
      ++expected;
    }
    for (const at::Tensor& p : module.parameters()) p.mutable_grad() = at::Tensor();
    for (const at::Tensor& p : reference.parameters()) p.mutable_grad() = at::Tensor();
  }
  const torch::NoGradGuard no_grad;
  const Placements everywhere(static_cast<std::size_t>(mesh.ndim()), Replicate());
  const at::Tensor given = mesh.ndim() == 1 ? row.input : distribute_tensor(row.input, mesh, everywhere, kNoSource);
  for (int call = 1; call <= 3; ++call)
    CHECK(scaled_difference(tp(given).toTensor(), reference.forward({row.input}).toTensor()) <= 1e-12);
}

}  // namespace

TEST_CASE("scripted and traced modules equal one process on calls 1 to 4, forward and backward, on 1 to 4 ranks") {
  for (const Row& row : rows()) {
    for (const int64_t size : {1, 2, 3, 4}) {
      CAPTURE(size);
      run_in_process(size, [&](const std::shared_ptr<World>& world) {
        check_calls(row, init_device_mesh("cpu", {size}, {"tp"}, world), {});
      });
    }
  }
}

TEST_CASE("one style alone is the root's, and a plan may be written in the call") {
  const DeviceMesh mesh = fake_mesh(0, {2}, {"tp"});
  torch::jit::Module linear = load("mlp").attr("up").toModule(), mlp = load("mlp");
  parallelize_module(linear, mesh, ColwiseParallel());
  parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  CHECK(placements_of(linear.attr("weight").toTensor()) == Placements{Shard(0)});
  CHECK(placements_of(mlp.attr("down").toModule().attr("weight").toTensor()) == Placements{Shard(1)});
}

TEST_CASE("a module that was called before, with plain tensors, is specialized anew") {
  const Row row = rows()[0];
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    torch::jit::Module module = load(row.name);
    at::Tensor want;
    for (int call = 0; call < 3; ++call) want = module.forward({row.input}).toTensor();
    auto tp = parallelize_module(module, mesh, row.plan);
    for (int call = 0; call < 3; ++call) CHECK(scaled_difference(tp(row.input).toTensor(), want) <= 1e-12);
  });
}

TEST_CASE("calls of the module itself and of its copies do not bring TorchScript's optimizer back") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    const at::Tensor x = at::arange(72, at::kDouble).view({2, 3, 12}) / 10;
    torch::jit::Module module = load("conv1d").attr("c_fc").toModule(), copy = module.deepcopy();
    auto tp = parallelize_module(module, mesh, ColwiseParallel({.output_layouts = Replicate()}));
    at::Tensor whole;
    (void)tp(x);
    for (int call = 0; call < 4; ++call) whole = copy.forward({x}).toTensor();
    // The optimizer would make mm and add of addmm, which has the contract.
    const at::Tensor got = tp(x).toTensor();
    CHECK(placements_of(got) == Placements{Replicate()});
    CHECK(scaled_difference(got.detach(), whole) <= 1e-12);
  });
}

TEST_CASE("modules that were traced in eval() call LibTorch's operators for inference, and are cut by heads too") {
  const at::Tensor x = rows().at(4).input;
  for (const auto& [name, plan] :
       {std::pair{"attends_traced_in_eval", kAttends}, {"encodes_traced_in_eval", kEncodes}}) {
    for (const int64_t size : {1, 2, 3}) {
      run_in_process(size, [&, name = std::string(name), &plan = plan](const std::shared_ptr<World>& world) {
        CAPTURE(name);
        CAPTURE(size);
        const DeviceMesh mesh = init_device_mesh("cpu", {size}, {"tp"}, world);
        torch::jit::Module reference = load(name), module = load(name);
        auto tp = parallelize_module(module, mesh, plan);
        const torch::NoGradGuard no_grad;
        for (int call = 0; call < 3; ++call) {
          CHECK(scaled_difference(tp(x).toTensor(), reference.forward({x}).toTensor()) <= 1e-12);
        }
      });
    }
  }
}

TEST_CASE("a call runs the hooks of the module's type, and forward alone does not") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    const at::Tensor x = at::arange(20, at::kDouble).view({2, 10}) / 10;
    torch::jit::Module plain = load("hooked");
    const at::Tensor called = plain({x}).toTensor(), forward = plain.forward({x}).toTensor();
    CHECK_FALSE(at::allclose(called, forward));
    auto tp = parallelize_module(load("hooked"), mesh, kMlp);
    CHECK(scaled_difference(tp(x).toTensor(), called) <= 1e-12);
    CHECK(scaled_difference(tp.forward({x}).toTensor(), forward) <= 1e-12);
  });
}

TEST_CASE("a module that was called before under TorchScript's older executor is specialized anew") {
  struct Older {
    const bool before = torch::jit::getExecutorMode().exchange(false);
    ~Older() { torch::jit::getExecutorMode() = before; }
  };
  run_in_process(1, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1}, {"tp"}, world);
    const at::Tensor x = at::arange(20, at::kDouble).view({2, 10}) / 10;
    const Older older;
    torch::jit::Module module = load("mlp");
    const at::Tensor want = module.forward({x}).toTensor();
    CHECK(scaled_difference(parallelize_module(module, mesh, kMlp)(x).toTensor(), want) <= 1e-12);
  });
}

TEST_CASE("parameters have the plan's placements, tied ones stay tied, collectives are those of the styles") {
  const Row row = rows()[2];
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    torch::jit::Module module = load(row.name);
    auto tp = parallelize_module(module, mesh, row.plan);
    const auto placed = [&](const std::string& name) {
      for (const auto& item : module.named_parameters()) {
        if (item.name == name) return placements_of(item.value);
      }
      FAIL("no parameter ", name);
      return Placements();
    };
    CHECK(placed("layers.1.attn.wk.weight") == Placements{Shard(0)});
    CHECK(placed("layers.0.down.weight") == Placements{Shard(1)});
    CHECK(placed("layers.0.norm1.weight") == Placements{Replicate()});
    const at::Tensor tok = module.attr("tok").toModule().attr("weight").toTensor();
    const at::Tensor head = module.attr("head").toModule().attr("weight").toTensor();
    CHECK(to_local(tok.detach()).is_alias_of(to_local(head.detach())));
    for (int call = 1; call <= 3; ++call) {
      CAPTURE(call);
      CommCounter counter(mesh);
      const Strict strict;
      tp(row.input);
      CAPTURE(counter.to_string());
      CHECK(counter.count("all_reduce") == 5);  // one of the embedding, and two per layer
      CHECK(counter.total() == 5);
    }
  });
}

TEST_CASE(
    "MultiheadAttention by heads, and Conv1D, make one all_reduce in forward, with gradients and without, and an "
    "encoder two for each layer") {
  for (const Row& row : rows()) {
    const bool encodes = row.name.starts_with("encodes");
    if (!row.name.starts_with("attends") && !encodes && row.name != "conv1d") continue;
    for (const int64_t size : {2, 3, 4}) {
      run_in_process(size, [&](const std::shared_ptr<World>& world) {
        const DeviceMesh mesh = init_device_mesh("cpu", {size}, {"tp"}, world);
        torch::jit::Module module = load(row.name);
        auto tp = parallelize_module(module, mesh, row.plan);
        for (const int mode : {0, 0, 1, 1, 2, 2}) {  // with gradients, without them, in inference mode
          CAPTURE(row.name);
          CAPTURE(size);
          CAPTURE(mode);
          const at::AutoGradMode gradients(mode == 0);
          const c10::InferenceMode inference(mode == 2);
          CommCounter counter(mesh);
          const Strict strict;
          tp(row.input);
          CAPTURE(counter.to_string());
          CHECK(counter.count("all_reduce") == (encodes ? 4 : 1));
          CHECK(counter.total() == (encodes ? 4 : 1));
        }
      });
    }
  }
}

TEST_CASE("an encoder without gradients has the values of one process") {
  for (const Row& row : rows()) {
    if (!row.name.starts_with("encodes")) continue;
    for (const int64_t size : {1, 2, 3, 4}) {
      run_in_process(size, [&](const std::shared_ptr<World>& world) {
        CAPTURE(row.name);
        CAPTURE(size);
        const DeviceMesh mesh = init_device_mesh("cpu", {size}, {"tp"}, world);
        torch::jit::Module reference = load(row.name), module = load(row.name);
        auto tp = parallelize_module(module, mesh, row.plan);
        for (int call = 1; call <= 3; ++call) {
          CAPTURE(call);
          const torch::NoGradGuard no_grad;
          CHECK(scaled_difference(tp(row.input).toTensor(), reference.forward({row.input}).toTensor()) <= 1e-12);
        }
      });
    }
  }
}

TEST_CASE(
    "parameters of a MultiheadAttention are sharded by whole heads, those of a Conv1D by columns or rows of x W") {
  const auto placed = [](const torch::jit::Module& module, const std::string& name) {
    return placements_of(module.attr(name).toTensor());
  };
  const DeviceMesh mesh = fake_mesh(0, {2}, {"tp"});
  for (const std::string name : {"attends", "attends_traced", "attends_traced_without_weights"}) {
    CAPTURE(name);
    torch::jit::Module module = load(name);
    parallelize_module(module, mesh, kAttends);
    const torch::jit::Module attention = module.attr("attention").toModule();
    CHECK(placed(attention, "in_proj_weight") == Placements{BlockCyclic(0, 6)});
    CHECK(placed(attention, "in_proj_bias") == Placements{BlockCyclic(0, 6)});
    CHECK(placed(attention.attr("out_proj").toModule(), "weight") == Placements{Shard(1)});
    CHECK(placed(attention.attr("out_proj").toModule(), "bias") == Placements{Replicate()});
  }
  torch::jit::Module mlp = load("conv1d");
  parallelize_module(mlp, mesh, kConv1D);
  CHECK(placed(mlp.attr("c_fc").toModule(), "weight") == Placements{Shard(1)});
  CHECK(placed(mlp.attr("c_fc").toModule(), "bias") == Placements{Shard(0)});
  CHECK(placed(mlp.attr("c_proj").toModule(), "weight") == Placements{Shard(0)});
  CHECK(placed(mlp.attr("c_proj").toModule(), "bias") == Placements{Replicate()});
}

TEST_CASE(
    "weights_of: a script module is trained, saved, and resumed on other ranks, and its file loads on one device") {
  const TempFolder folder;
  const Row row = rows()[2];  // the model
  const auto parts = [&](const DeviceMesh& mesh, const auto& body) {
    torch::jit::Module module = load(row.name);
    auto tp = parallelize_module(module, mesh, row.plan);
    const auto weights = weights_of(module);
    torch::optim::Adam optimizer(weights->parameters(), torch::optim::AdamOptions(0.01));
    TrainingState state = {.mesh = mesh, .model = *weights, .optimizer = &optimizer};
    const auto step = [&] {
      optimizer.zero_grad();
      tp(row.input).toTensor().square().mean().backward();
      optimizer.step();
    };
    body(state, step, *weights);
  };
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    parts(init_device_mesh("cpu", {2}, {"tp"}, world), [&](TrainingState& state, const auto& step, auto&) {
      step();
      state.step = 1;
      save_training_state(state, folder / "states");
    });
  });
  run_in_process(3, [&](const std::shared_ptr<World>& world) {
    parts(init_device_mesh("cpu", {3}, {"tp"}, world), [&](TrainingState& state, const auto& step, auto& weights) {
      CHECK(load_newest_training_state(state, folder / "states"));
      step();
      save_weights(weights, folder / "m.safetensors");
    });
  });
  torch::jit::Module whole = load(row.name), loaded = load(row.name);
  std::vector<at::Tensor> parameters;  // the embedding and the head are one
  for (const at::Tensor& p : whole.parameters()) {
    const auto is_p = [&](const at::Tensor& other) { return other.is_same(p); };
    if (std::ranges::none_of(parameters, is_p)) parameters.push_back(p);
  }
  CHECK(parameters.size() + 1 == whole.parameters().size());
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(0.01));
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    whole.forward({row.input}).toTensor().square().mean().backward();
    optimizer.step();
  }
  load_weights(*weights_of(loaded), folder / "m.safetensors");
  CHECK(scaled_difference(loaded.forward({row.input}).toTensor(), whole.forward({row.input}).toTensor()) <= 1e-9);
}

TEST_CASE("run_method calls another method as forward is called") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    torch::jit::Module module("Scale");
    module.register_attribute("training", c10::BoolType::get(), true);
    module.register_parameter("weight", torch::full({4}, 2.0), /*is_buffer=*/false);
    module.define("def forward(self, x):\n  return x * self.weight\n");
    module.define("def twice(self, x, more: int):\n  return self.forward(self.forward(x)) + more\n");
    auto tp = parallelize_module(module, init_device_mesh("cpu", {2}, {"tp"}, world), {});
    const at::Tensor x = torch::ones({3, 4});
    CHECK(full_tensor(tp.run_method("twice", {x}, {{"more", 1}}).toTensor()).equal(torch::full({3, 4}, 5.0)));
    CHECK_THROWS_WITH(tp.run_method("thrice", {x}), doctest::Contains("thrice"));
  });
}

TEST_CASE("a loop's result is the operand of an operator whose other operand the loop uses") {
  const std::string loop =
      "  acc = x\n"
      "  for i in range(3):\n"
      "    acc = acc + x * self.weight\n"
      "  x = x + acc\n"
      "  for j in range(3):\n"
      "    x = x + self.weight\n"
      "  return x\n";
  const std::string in_if =
      "  if x.dim() == 7:\n"
      "    acc = x * 2.0\n"
      "  else:\n"
      "    acc = x * 2.0\n"
      "    for i in range(3):\n"
      "      acc = acc + x * 2.0\n"
      "  x = x + acc\n"
      "  for j in range(3):\n"
      "    x = x * 2.0\n"
      "  return x\n";
  const at::Tensor x = torch::ones({3, 4});
  for (const auto& [body, result] : {std::pair(loop, 1.0 + 7.0 + 6.0), std::pair(in_if, (1.0 + 8.0) * 8.0)}) {
    const at::Tensor want = torch::full({3, 4}, result);
    const auto make = [&text = body] {
      torch::jit::Module module("Loops");
      module.register_attribute("training", c10::BoolType::get(), true);
      module.register_parameter("weight", torch::full({4}, 2.0), /*is_buffer=*/false);
      module.define("def forward(self, x):\n" + text);
      return module;
    };
    {
      // Where this no longer throws, LibTorch's interpreter is mended, and keep_loops_apart in styles/script_code.cpp
      // may go.
      const torch::jit::GraphOptimizerEnabledGuard off(false);
      torch::jit::Module plain = make();
      torch::jit::toGraphFunction(plain.get_method("forward").function())
          ._set_initial_executor_execution_mode(torch::jit::SIMPLE);
      CHECK_THROWS_WITH(plain.forward({x}), doctest::Contains("Expected Tensor but got None"));
    }
    run_in_process(2, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
      for (const std::optional<at::ScalarType> dtype :
           {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
        torch::jit::Module module = make();
        const std::string graph = module.get_method("forward").graph()->toString();
        auto tp = parallelize_module(module, mesh, {}, {.compute_dtype = dtype});
        const at::Tensor cut = distribute_tensor(x, mesh, {Shard(0)});
        for (int time = 0; time < 3; ++time) CHECK(full_tensor(tp(cut).toTensor()).equal(want));
        CHECK(module.get_method("forward").graph()->toString() == graph);  // as which the module is saved
      }
    });
  }
}

TEST_CASE("weights_of keeps names, what is frozen, and buffers") {
  torch::jit::Module module("Scale"), inner("Inner");
  module.register_attribute("training", c10::BoolType::get(), true);
  inner.register_attribute("training", c10::BoolType::get(), true);
  inner.register_parameter("weight", torch::ones({4}).requires_grad_(), /*is_buffer=*/false);
  inner.register_parameter("fixed", torch::ones({4}), /*is_buffer=*/false);
  inner.register_parameter("count", torch::zeros({}), /*is_buffer=*/true);
  inner.type()->addAttribute("maybe", c10::OptionalType::create(c10::TensorType::get()), /*is_parameter=*/false,
                             /*is_buffer=*/true);
  inner.setattr("maybe", torch::ones({2}));
  inner.define("def forward(self, x):\n  return x * self.weight + self.fixed + self.count\n");
  module.register_module("inner", inner);
  module.define("def forward(self, x):\n  return self.inner.forward(x)\n");
  const auto weights = weights_of(module);
  CHECK(weights->named_parameters()["inner.weight"].is_same(inner.attr("weight").toTensor()));
  CHECK(weights->named_parameters()["inner.weight"].requires_grad());
  CHECK_FALSE(weights->named_parameters()["inner.fixed"].requires_grad());
  CHECK(weights->named_buffers()["inner.count"].is_same(inner.attr("count").toTensor()));
  CHECK(weights->named_buffers()["inner.maybe"].is_same(inner.attr("maybe").toTensor()));
}

TEST_CASE("data_placement: gathered in forward and backward of TorchScript too") {
  const std::vector<Row> all = rows();
  run_in_process(4, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
    check_calls({all[0].name, {}, all[0].input}, mesh, {.data_placement = Shard(0)});
  });
}

TEST_CASE("data_placement with a batch in pieces: Strict in forward, and gradients of one process") {
  const Row row = rows()[0];
  run_in_process(4, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
    for (const ParallelPlan& plan : {ParallelPlan{}, kMlp}) {
      torch::jit::Module reference = load(row.name), module = load(row.name);
      auto tp = parallelize_module(module, mesh, plan, {.data_placement = Shard(0)});
      const at::Tensor x = distribute_tensor(row.input, mesh, {Shard(0), Replicate()}, kNoSource).detach();
      for (int call = 1; call <= 3; ++call) {
        CAPTURE(call);
        const at::Tensor want = reference.forward({row.input}).toTensor();
        std::optional<Strict> strict(std::in_place);
        const at::Tensor got = tp(x).toTensor();
        strict.reset();
        CHECK(placements_of(got)[0] == Shard(0));
        CHECK(scaled_difference(got, want) <= 1e-12);
        want.square().mean().backward();
        got.square().mean().backward();
      }
      const auto wanted = reference.named_parameters();
      auto expected = wanted.begin();
      for (const auto& item : module.named_parameters()) {
        CAPTURE(item.name);
        CHECK(placements_of(item.value.grad()) == placements_of(item.value));
        CHECK(scaled_difference(item.value.grad(), (*expected).value.grad()) <= 1e-12);
        ++expected;
      }
    }
  });
}

TEST_CASE("a module that was made by hand, without an attribute called training, is no frozen one") {
  const at::Tensor weight = torch::arange(12, torch::kDouble).view({4, 3}), x = torch::ones({2, 4}, torch::kDouble);
  const auto make = [&](const std::string& body) {
    torch::jit::Module hand("Hand");
    hand.register_parameter("weight", weight.clone().set_requires_grad(true), /*is_buffer=*/false);
    hand.define("def forward(self, x):\n    return " + body + "\n");
    return hand;
  };
  const DeviceMesh mesh = fake_mesh(0, {2}, {"tp"});
  torch::jit::Module hand = make("torch.matmul(x, self.weight)");
  hand.forward({x});
  auto tp = parallelize_module(hand, mesh, {});
  CHECK(is_dtensor(hand.attr("weight").toTensor()));
  CHECK(scaled_difference(tp(x).toTensor(), x.matmul(weight)) == 0);
}

TEST_CASE("TorchScript's optimizer is switched off for one thread, not for the process") {
  const torch::jit::GraphOptimizerEnabledGuard off(false);
  bool elsewhere = false;
  std::thread([&] { elsewhere = torch::jit::getGraphExecutorOptimize(); }).join();
  CHECK(elsewhere);
  CHECK_FALSE(torch::jit::getGraphExecutorOptimize());
}

TEST_CASE("refused: frozen and optimized modules, Prepare styles, other types, an embedding that renormalizes") {
  const auto refused = [](const std::string& name, const ParallelPlan& plan, const std::string& text) {
    CAPTURE(name);
    check_refused_on_every_rank({2}, {"tp"}, text,
                                [&](const DeviceMesh& mesh) { parallelize_module(load(name), mesh, plan); });
  };
  for (const std::string name : {"frozen", "frozen_with_training", "optimized"}) {
    refused(name, {}, "is a frozen, optimized or quantized TorchScript module");
    refused(name, kMlp, "Load the module as it was before torch.jit.freeze");
  }
  // Its weights are a list among the constants.
  check_refused_on_every_rank({2}, {"tp"}, "is a frozen, optimized or quantized TorchScript module",
                              [&](const DeviceMesh& mesh) {
                                torch::jit::Module recurrent = load("recurrent");
                                recurrent.eval();
                                parallelize_module(torch::jit::freeze(recurrent), mesh, {});
                              });
  refused("mlp", {{"", PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}})}},
          "of TorchScript cannot be hooked");
  refused("model", {{"layers.0.norm1", ColwiseParallel()}}, "of type torch.nn.modules.normalization.LayerNorm");
  refused("renormalized", {{"0", ColwiseParallel()}}, "max_norm");
  refused("sparse", {{"0", ColwiseParallel()}}, "0 has sparse(true)");
  refused("sparse", {}, "0 has sparse(true)");
  refused("forks", {{"0.up", ColwiseParallel()}}, "parallelize_module: 0 calls torch.jit.fork");
  refused("mlp", {{"side", ColwiseParallel()}}, "the root's are: up, down");
  check_refused_on_every_rank(
      {2}, {"tp"}, "leave compute_dtype out, or script the module without these blocks", [&](const DeviceMesh& mesh) {
        parallelize_module(load("switches_autocast"), mesh, kMlp, {.compute_dtype = at::kBFloat16});
      });
  for (int time = 0; time < 2; ++time) refused("asks_for_autocast", {}, "AsksForAutocast.forward, so that they would");
  check_refused_on_every_rank({2, 1}, {"dp", "tp"}, "the parallelized module: its input [2, 8] is plain",
                              [&](const DeviceMesh& mesh) {
                                parallelize_module(load("mlp"), mesh, {}, {.src_rank = kNoSource})(at::ones({2, 8}));
                              });
}

TEST_CASE("compute_dtype: operators compute in bfloat16, and gradients stay float32") {
  for (const Row& row : rows()) {
    CAPTURE(row.name);
    for (const int64_t size : {1, 2, 3}) {
      run_in_process(size, [&](const std::shared_ptr<World>& world) {
        const DeviceMesh mesh = init_device_mesh("cpu", {size}, {"tp"}, world);
        torch::jit::Module reference = load(row.name), module = load(row.name);
        module.to(at::kFloat);
        auto tp = parallelize_module(module, mesh, row.plan, {.compute_dtype = at::kBFloat16});
        const at::Tensor input = row.input.is_floating_point() ? row.input.to(at::kFloat) : row.input;
        const at::Tensor want = reference.forward({row.input}).toTensor();
        for (int call = 1; call <= 2; ++call) {
          const at::Tensor got = tp(input).toTensor();
          CHECK(scaled_difference(got.to(at::kDouble), want) <= 0.03);
          CHECK(scaled_difference(got.to(at::kDouble), want) > 1e-6);
          got.square().mean().backward();
        }
        for (const auto& item : module.named_parameters()) {
          if (item.value.grad().defined()) CHECK((item.value.grad().scalar_type() == at::kFloat));
        }
      });
    }
  }
}

TEST_CASE("compute_dtype computes what autocast computes in one process") {
  for (const std::string name : {"mlp", "traced", "attends"}) {
    CAPTURE(name);
    const std::vector<Row> all = rows();
    const Row& row = *std::find_if(all.begin(), all.end(), [&](const Row& each) { return each.name == name; });
    const DeviceMesh mesh = fake_mesh(0, {1}, {"tp"});
    torch::jit::Module reference = load(name), module = load(name);
    reference.to(at::kFloat);
    module.to(at::kFloat);
    auto tp = parallelize_module(module, mesh, row.plan, {.compute_dtype = at::kBFloat16});
    const at::Tensor input = row.input.is_floating_point() ? row.input.to(at::kFloat) : row.input;
    const tessera::detail::ComputeIn autocast({.dtype = at::kBFloat16});
    const torch::jit::GraphOptimizerEnabledGuard unoptimized(false);
    for (const auto& item : reference.named_modules()) {
      for (const auto& method : item.value.get_methods()) {
        torch::jit::toGraphFunction(method.function())._set_ignore_amp(true);
      }
    }
    const at::Tensor want = reference.forward({input}).toTensor();
    CHECK(at::equal(full_tensor(tp(input).toTensor()), want));
  }
}

TEST_CASE("blocks of a script that switch autocast themselves keep their effect") {
  const at::Tensor x = rows().front().input.to(at::kFloat);
  const at::Tensor want = load("switches_autocast").forward({x}).toTensor();
  for (const bool was_called : {false, true}) {
    CAPTURE(was_called);
    torch::jit::Module module = load("switches_autocast");
    if (was_called) {
      const torch::jit::GraphOptimizerEnabledGuard unoptimized(false);
      module.forward({x});
    }
    auto tp = parallelize_module(module, fake_mesh(0, {1}, {"tp"}), kMlp);
    CHECK(at::equal(full_tensor(tp(x).toTensor()), want));
  }
}

TEST_CASE("a compute_dtype that one rank gives is refused on every rank") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    ParallelizeOptions options;
    if (world->rank() == 1) options.compute_dtype = at::kBFloat16;
    const torch::jit::Module module = load("switches_autocast");
    CHECK_THROWS_WITH_AS(parallelize_module(module, mesh, kMlp, options),
                         doctest::Contains("rank 1: parallelize_module: compute_dtype BFloat16 for a TorchScript"),
                         std::invalid_argument);
    CHECK_NOTHROW(parallelize_module(module, mesh, kMlp));
  });
}

TEST_CASE("where several ranks split the batch, tuples, lists and dictionaries among the arguments are looked into") {
  torch::jit::Module first("First"), shaped("Shaped");
  first.define("def forward(self, x: Tuple[int, Tensor]):\n    return x[1]\n");
  shaped.define("def forward(self, x, sizes: List[int]):\n    return x\n");
  const auto call_first = [&](const DeviceMesh& mesh, const at::Tensor& x) {
    parallelize_module(first, mesh, {}, {.src_rank = kNoSource})(std::tuple<int64_t, at::Tensor>(1, x));
  };
  const auto call_shaped = [&](const DeviceMesh& mesh, const at::Tensor& x) {
    parallelize_module(shaped, mesh, {}, {.src_rank = kNoSource})(x, std::vector<int64_t>{2, 8});
  };
  const at::Tensor x = at::ones({2, 8});
  const std::string text = "the parallelized module: its input [2, 8] is plain";
  check_refused_on_every_rank({2, 1}, {"dp", "tp"}, text, [&](const DeviceMesh& mesh) { call_first(mesh, x); });
  check_refused_on_every_rank({2, 1}, {"dp", "tp"}, text, [&](const DeviceMesh& mesh) { call_shaped(mesh, x); });
  const DeviceMesh mesh = fake_mesh(0, {2, 1}, {"dp", "tp"});
  const at::Tensor batch = from_local(x, mesh, {Shard(0), Replicate()});
  CHECK_NOTHROW(call_first(mesh, batch));
  CHECK_NOTHROW(call_shaped(mesh, batch));

  torch::jit::Module named("Named"), optioned("Optioned");
  named.define("def forward(self, x: Dict[str, Tensor]):\n    return x['x']\n");
  optioned.define("def forward(self, x, options: Dict[str, int]):\n    return x\n");
  c10::Dict<std::string, int64_t> options;
  options.insert("steps", 2);
  const auto call_named = [&](const DeviceMesh& on, const at::Tensor& value) {
    c10::Dict<std::string, at::Tensor> inputs;
    inputs.insert("x", value);
    parallelize_module(named, on, {}, {.src_rank = kNoSource})(inputs);
  };
  const auto call_optioned = [&](const DeviceMesh& on, const at::Tensor& value) {
    parallelize_module(optioned, on, {}, {.src_rank = kNoSource})(value, options);
  };
  check_refused_on_every_rank({2, 1}, {"dp", "tp"}, text, [&](const DeviceMesh& on) { call_named(on, x); });
  check_refused_on_every_rank({2, 1}, {"dp", "tp"}, text, [&](const DeviceMesh& on) { call_optioned(on, x); });
  CHECK_NOTHROW(call_named(mesh, batch));
  CHECK_NOTHROW(call_optioned(mesh, batch));
}

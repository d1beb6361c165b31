// Tests that a training goes on from a training state on any mesh.

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/nn/functional/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/io/changed_manifest.h"
#include "tessera/tests/dtensor/io/sample_state.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using testing::world;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("up", up);
    register_module("norm", norm);
    register_module("down", down);
    // Values that every process computes alike, without communication.
    const torch::NoGradGuard no_grad;
    double phase = 0;
    for (at::Tensor& p : parameters()) {
      p.set_data(torch::sin(torch::arange(p.numel(), torch::kDouble) + ++phase).mul(0.5).reshape(p.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::nn::functional::dropout(torch::tanh(up(norm(x))), {})); }

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  torch::nn::Linear up{6, 10};    // 10 over 4 ranks is 3, 3, 3, 1
  torch::nn::Linear down{10, 2};  // 2 over 3 ranks has an empty piece
};
TORCH_MODULE(Mlp);

// Holds a training, sharded as `layout` says: "tp", "dp" (replicas), "zero" (ZeRO-3), "dp x tp" or "zero x tp".
struct Training {
  explicit Training(const std::string& layout) : mesh(mesh_of_layout(layout)) {
    const bool has_tp = layout.find("tp") != std::string::npos;
    ParallelizeOptions options;
    options.src_rank = kNoSource;
    if (layout.starts_with("zero")) options.data_placement = Shard(0);
    if (has_tp) {
      parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}, options);
    } else {
      options.tensor_dim = 1;
      parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}, options);
    }
    optimizer = std::make_unique<torch::optim::AdamW>(mlp->parameters(), torch::optim::AdamWOptions(0.05));
    scheduler = std::make_unique<torch::optim::StepLR>(*optimizer, 2, 0.5);
    manual_seed(11, *world());
  }

  static DeviceMesh mesh_of_layout(const std::string& layout) {
    const int64_t size = world()->size();
    if (layout == "tp") return init_device_mesh("cpu", {1, size}, {"dp", "tp"}, world());
    if (layout == "dp" || layout == "zero") return init_device_mesh("cpu", {size, 1}, {"dp", "tp"}, world());
    return init_device_mesh("cpu", {size / 2, 2}, {"dp", "tp"}, world());
  }

  TrainingState state() {
    return {.mesh = mesh,
            .model = *mlp,
            .optimizer = optimizer.get(),
            .scheduler = scheduler.get(),
            .scaler = &scaler,
            .step = step,
            .values = {{"position", std::to_string(step * 4)}}};
  }
  void load(const std::string& path) {
    TrainingState loaded = state();
    CHECK(load_newest_training_state(loaded, path));
    step = loaded.step;
    CHECK(loaded.values == std::map<std::string, std::string>{{"position", std::to_string(step * 4)}});
  }

  void train_to(int64_t end) {
    const ImplicitReplication replicated;
    for (; step < end; ++step) {
      const at::Tensor batch =
          torch::cos(torch::arange(24, torch::kDouble).mul(0.1 + static_cast<double>(step))).reshape({4, 6});
      const at::Tensor x = distribute_tensor(batch, mesh, {Shard(0), Replicate()}, kNoSource);
      optimizer->zero_grad();
      scaler.scale(mlp(x).square().mean()).backward();
      CHECK(scaler.step(*optimizer));
      scaler.update();
      scheduler->step();
    }
  }

  DeviceMesh mesh;
  Mlp mlp;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  std::unique_ptr<torch::optim::StepLR> scheduler;
  LossScaler scaler{{.initial_scale = 1024, .growth_interval = 2}};  // a state is between two changes of the scale
  int64_t step = 0;
};

std::vector<std::string> layouts() {
  switch (world()->size()) {
    case 1: return {"tp"};
    case 4: return {"tp", "dp", "zero", "dp x tp", "zero x tp"};
    default: return {"tp", "dp", "zero"};
  }
}

std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& item : std::filesystem::directory_iterator(folder)) {
    const std::string name = item.path().filename().string();
    if (!name.starts_with(".")) files[name] = read_text(item.path().string());  // ".saved_by" names the job
  }
  return files;
}

// Returns the largest difference between the tensors of two files, as a part of the largest value of each tensor; NaN
// where a difference is NaN.
double largest_difference(const std::string& a, const std::string& b) {
  const SafetensorsFile file_a(a);
  const SafetensorsFile file_b(b);
  CHECK((file_a.tensors() == file_b.tensors()));
  double largest = 0;
  for (const TensorEntry& entry : file_a.tensors()) {
    const at::Tensor x = file_a.read(entry).to(torch::kDouble);
    const at::Tensor y = file_b.read(entry).to(torch::kDouble);
    const double difference = ((x - y).abs().max() / y.abs().max().clamp_min(1e-3)).item<double>();
    if (std::isnan(difference)) return difference;
    largest = std::max(largest, difference);
  }
  return largest;
}

// Says whether all that is not a tensor is the same in two states: the optimizer's options are in its file's header.
void check_same_run(const std::string& a, const std::string& b) {
  StateManifest x = parse_state_manifest(read_state_manifest(a), a);
  StateManifest y = parse_state_manifest(read_state_manifest(b), b);
  x.files.clear();
  y.files.clear();
  CHECK(serialize_state_manifest(x) == serialize_state_manifest(y));
  CHECK(SafetensorsFile(a + "/optimizer.safetensors").metadata() ==
        SafetensorsFile(b + "/optimizer.safetensors").metadata());
}

TESSERA_RANKS_TEST_CASE(
    "training state: saved on 4 ranks in 5 layouts, loaded on any mesh: saved at once it is byte-equal, and training "
    "goes "
    "on as without a stop",
    testing::Ranks({4, 1, 2, 3}).time_limit(std::chrono::seconds(120))) {
  // The path is the same for all four runs, which are children of one process.
  const char* base = std::getenv("TEST_TMPDIR");
  const std::string folder =
      std::string(base != nullptr ? base : "/tmp") + "/tessera_state_" + std::to_string(::getppid());
  const DeviceMesh line = init_device_mesh("cpu", {world()->size()}, {"all"}, world());
  const std::vector<std::string> saved = {"tp", "dp", "zero", "dp x tp", "zero x tp"};
  const SaveStateOptions small = {.block_bytes = 96};
  if (world()->size() == 4) {
    for (const std::string& layout : saved) {
      Training training(layout);
      training.train_to(3);
      save_training_state(training.state(), folder + "/" + layout, small);
      training.train_to(6);
      save_training_state(training.state(), folder + "/" + layout + " end", small);
    }
  }
  for (std::size_t i = 0; i < saved.size(); ++i) {
    const std::string& from = saved[i];
    const std::string there = folder + "/" + from;
    for (std::size_t j = 0; j < layouts().size(); ++j) {
      const std::string to = layouts()[j];
      CAPTURE(from);
      CAPTURE(to);
      Training training(to);
      training.load(there);
      CHECK(training.step == 3);
      const std::string again = folder + "/again";
      save_training_state(training.state(), again, small);
      CHECK(contents(again + "/step_00000003") == contents(there + "/step_00000003"));
      barrier(line, 0);
      if ((i + j) % layouts().size() != 0) continue;  // each layout goes on from one state or more
      training.train_to(6);
      save_training_state(training.state(), again, small);
      const std::string end = again + "/step_00000006";
      const std::string want = there + " end/step_00000006";
      check_same_run(end, want);
      CHECK(largest_difference(end + "/model.safetensors", want + "/model.safetensors") < 1e-10);
      CHECK(largest_difference(end + "/optimizer.safetensors", want + "/optimizer.safetensors") < 1e-10);
      barrier(line, 0);
    }
  }
  barrier(line, 0);
  if (world()->size() == 3 && world()->rank() == 0) std::filesystem::remove_all(folder);
}

TESSERA_RANKS_TEST_CASE("training state: its step and values are read without its tensors, and not from a broken file",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  TrainingState state = module.state(12);
  state.values = {{"position", "48"}, {"text", "\"a\"\n\u00e4"}, {"nothing", ""}};
  save_training_state(state, folder.path());
  const std::string step = folder / "step_00000012", manifest = step + "/state.json";
  const CommCounter counter(mesh);
  const SavedTrainingState saved = read_training_state(step);
  CHECK(counter.total() == 0);
  CHECK(saved.step == 12);
  CHECK(saved.values == state.values);

  const std::string good = read_text(manifest);
  std::string other = good;  // it has the checksum of another text
  other.replace(other.find("\"step\":12"), 9, "\"step\":13");
  struct Row {
    std::string text;
    const char* part;
  };
  const std::vector<Row> rows = {
      {"", "its 0 bytes do not begin and end as those of a manifest"},
      {good.substr(0, good.size() / 2), "do not begin and end as those of a manifest"},
      {other, "it has the checksum "},
      {changed_manifest(good, "\"step\":12", "\"step\":-1"), "'step' is '-1', not a number of its range"},
      {changed_manifest(good, "\"step\":12", "\"steps\":12"), "'step' is missing"},
      {changed_manifest(good, "\"position\":\"48\"", "\"position\":48"), "of 'values' is not text"},
      {changed_manifest(good, "\"version\":1", "\"version\":2"), "its version is 2"},
  };
  for (const Row& row : rows) {
    folder.wait();
    if (world()->rank() == 0) write_text(manifest, row.text);
    folder.wait();
    CAPTURE(row.part);
    CHECK_THROWS_WITH_AS(read_training_state(step), doctest::Contains(row.part), std::invalid_argument);
  }
  folder.wait();
  if (world()->rank() == 0) std::filesystem::remove(manifest);
  folder.wait();
  CHECK_THROWS_WITH_AS(read_training_state(step), doctest::Contains("No such file or directory"), std::runtime_error);
}

}  // namespace
}  // namespace tessera

// Tests what loading and saving do where a state is damaged, goes or does not fit, a folder is not the same for all, or
// a mesh lacks ranks.

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/io/step_folders.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/io/changed_manifest.h"
#include "tessera/tests/dtensor/io/failing_reads.h"
#include "tessera/tests/dtensor/io/logged.h"
#include "tessera/tests/dtensor/io/same_message.h"
#include "tessera/tests/dtensor/io/sample_state.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using testing::world;

// Saves steps 1 to `last`, whose values are their numbers.
void save_steps(Sample& module, const std::string& folder, int64_t last) {
  for (int64_t step = 1; step <= last; ++step) {
    module.fill(static_cast<double>(step));
    save_training_state(module.state(step), folder);
  }
}

TESSERA_RANKS_TEST_CASE("training state: the first rank warns of each state that is passed over, with the reason",
                        {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 3);
  folder.wait();
  if (world()->rank() == 0) {
    std::filesystem::remove(folder / "step_00000003/state.json");
    write_text(folder / "step_00000002/model.safetensors", "cut");
  }
  folder.wait();
  TrainingState state = module.state(0);
  const std::string text = logged([&] { CHECK(load_newest_training_state(state, folder.path())); });
  CHECK(state.step == 1);
  CHECK(module.value() == 1);
  if (world()->rank() == 0) {
    contains(text, "step_00000003/state.json': No such file or directory; an older state is looked for");
    contains(text, "step_00000002/model.safetensors' has 3 bytes, not the ");
  } else {
    CHECK(text.empty());
  }
}

TESSERA_RANKS_TEST_CASE("training state: where there are states and none is whole, no run begins anew unnoticed",
                        {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 2);
  folder.wait();
  if (world()->rank() == 0) {
    for (const char* step : {"step_00000001", "step_00000002"})
      std::filesystem::remove(folder / (std::string(step) + "/state.json"));
  }
  folder.wait();
  module.fill(7);
  TrainingState state = module.state(0);
  const std::string text = same_message(mesh, [&] { load_newest_training_state(state, folder.path()); });
  contains(text, "' has training states of 2 steps, and none is whole");
  contains(text, "The newest: cannot open '" + folder / "step_00000002/state.json': No such file or directory");
  CHECK(module.value() == 7);
  CHECK(state.step == 0);
}

TESSERA_RANKS_TEST_CASE("training state: the folder of a step and that of all steps are told apart", {1, 2}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 1);
  folder.wait();
  TrainingState state = module.state(0);
  const std::string step = folder / "step_00000001", file = step + "/state.json";
  contains(same_message(mesh, [&] { load_newest_training_state(state, step); }),
           "is the folder of one step; give the folder in which it lies");
  contains(same_message(mesh, [&] { load_newest_training_state(state, file); }), "is no folder");
  CHECK_THROWS_WITH_AS(newest_training_state(step), doctest::Contains("is the folder of one step"),
                       std::invalid_argument);
  contains(same_message(mesh, [&] { load_training_state(state, folder.path()); }),
           "holds folders of steps; give one of them, or call load_newest_training_state");
  CHECK(state.step == 0);
  load_training_state(state, step);
  CHECK(state.step == 1);
}

TESSERA_RANKS_TEST_CASE("training state: a newest state of another version is an error, not passed over", {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 2);
  folder.wait();
  if (world()->rank() == 0) {
    const std::string manifest = folder / "step_00000002/state.json";
    write_text(manifest, changed_manifest(read_text(manifest), "\"version\":1", "\"version\":2"));
  }
  folder.wait();
  TrainingState state = module.state(0);
  contains(same_message(mesh, [&] { load_newest_training_state(state, folder.path()); }),
           "step_00000002/state.json': its version is 2, and this program reads version 1");
  CHECK(state.step == 0);
}

TESSERA_RANKS_TEST_CASE(
    "training state: where the disk has lost bytes that one rank reads, all load an older state; after other errors "
    "none",
    {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 2);
  struct Row {
    const char* file;
    int error;
    const char* text;
  };
  for (const Row& row : {Row{"step_00000002/model.safetensors", EIO, "Input/output error"},
                         Row{"step_00000002/state.json", EUCLEAN, "Structure needs cleaning"}}) {
    CAPTURE(row.file);
    module.fill(7);
    TrainingState state = module.state(0);
    const std::string text = logged([&] {
      std::optional<FailingReads> reads;
      if (is_last()) reads.emplace(row.file, row.error);
      CHECK(load_newest_training_state(state, folder.path()));
    });
    CHECK(state.step == 1);
    CHECK(module.value() == 1);
    if (world()->rank() == 0) contains(text, row.text);
  }
  module.fill(7);
  TrainingState state = module.state(0);
  contains(same_message(mesh,
                        [&] {
                          std::optional<FailingReads> reads;
                          if (is_last()) reads.emplace("step_00000002/model.safetensors", ENOMEM);
                          load_newest_training_state(state, folder.path());
                        }),
           "step_00000002/model.safetensors': Cannot allocate memory");
  CHECK(module.value() == 7);
  CHECK(state.step == 0);
}

TESSERA_RANKS_TEST_CASE("training state: under Checked, bytes of an optimizer that one rank alone has lost are damage",
                        {3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  torch::optim::AdamW optimizer(module.parameters());
  const auto state_of = [&](int64_t step) {
    TrainingState state = module.state(step);
    state.optimizer = &optimizer;
    return state;
  };
  for (int64_t step = 1; step <= 2; ++step) {
    for (at::Tensor& p : module.parameters()) p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
    save_training_state(state_of(step), folder.path());
  }
  const Checked checked(mesh);
  TrainingState state = state_of(0);
  const std::string text = logged([&] {
    std::optional<FailingReads> reads;
    if (is_last()) reads.emplace("step_00000002/optimizer.safetensors", EIO);
    CHECK(load_newest_training_state(state, folder.path()));
  });
  CHECK(state.step == 1);
  if (world()->rank() == 0) contains(text, "Input/output error");
}

TESSERA_RANKS_TEST_CASE("training state: where a state goes while a rank reads it, all look for the newest again",
                        {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 3);
  folder.wait();
  if (world()->rank() == 0) std::filesystem::rename(folder / "step_00000003", folder / "not yet");
  folder.wait();
  TrainingState state = module.state(0);
  std::optional<FailingReads> reads;
  int64_t manifests = 0;  // each look reads two: whether the state is whole, and what is in it
  const auto as_a_saver_does = [&] {
    if (++manifests == 2) {
      std::filesystem::rename(folder / "not yet", folder / "step_00000003");
      std::filesystem::rename(folder / "step_00000002", folder / "removed");
    }
    return 0;
  };
  if (is_last()) reads.emplace("step_00000002/state.json", as_a_saver_does);
  CHECK(logged([&] { CHECK(load_newest_training_state(state, folder.path())); }).empty());
  CHECK(state.step == 3);
  CHECK(module.value() == 3);
}

TESSERA_RANKS_TEST_CASE("training state: where a newer one comes between the looks of two ranks, all load it", {3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 3);
  folder.wait();
  const std::string newest = folder / "step_00000003";
  if (world()->rank() == 0) std::filesystem::rename(newest, folder / "not yet");
  folder.wait();
  TrainingState state = module.state(0);
  std::optional<FailingReads> reads;
  bool saved = false;
  const auto as_a_saver_does = [&] {
    if (!std::exchange(saved, true)) std::filesystem::rename(folder / "not yet", newest);
    return 0;
  };
  // The last rank finds step 2, and the others look when step 3 is there.
  if (is_last()) reads.emplace("step_00000002/state.json", as_a_saver_does);
  while (!is_last() && !std::filesystem::exists(newest)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(logged([&] { CHECK(load_newest_training_state(state, folder.path())); }).empty());
  CHECK(state.step == 3);
  CHECK(module.value() == 3);
}

TESSERA_RANKS_TEST_CASE(
    "training state: where every newest state goes while a rank reads it, ranks look 10 times again", {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  save_steps(module, folder.path(), 1);
  folder.wait();
  for (int64_t step = 2; world()->rank() == 0 && step <= 12; ++step) {
    std::filesystem::copy(folder / "step_00000001", folder / step_folder_name(step),
                          std::filesystem::copy_options::recursive);
  }
  folder.wait();
  module.fill(7);
  TrainingState state = module.state(0);
  std::optional<FailingReads> reads;
  int64_t manifests = 0;
  const auto remove_newest = [&] {
    const int64_t look = ++manifests / 2;
    if (manifests % 2 == 0)
      std::filesystem::rename(folder / step_folder_name(13 - look), folder / std::to_string(look));
    return 0;
  };
  if (is_last()) reads.emplace("/state.json", remove_newest);
  const std::string text = same_message(mesh, [&] { load_newest_training_state(state, folder.path()); });
  reads.reset();
  contains(text, "cannot open '" + folder / "step_00000002/");
  contains(text, "No such file or directory");
  CHECK(newest_training_state(folder.path()) == folder / "step_00000001");
  CHECK(module.value() == 7);
  CHECK(state.step == 0);
}

TESSERA_RANKS_TEST_CASE("training state: what does not fit is an error of this function, without another one's options",
                        {1}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  torch::nn::Module saved, other;
  saved.register_parameter("less", torch::zeros({2}));
  saved.register_parameter("both", torch::zeros({2}));
  other.register_parameter("both", torch::zeros({2}, torch::kDouble));
  other.register_parameter("more", torch::zeros({2}));
  torch::optim::SGD sgd(saved.parameters(), torch::optim::SGDOptions(0.1));
  const std::string step = folder / "step_00000001";
  save_training_state({.mesh = mesh, .model = saved, .optimizer = &sgd, .step = 1}, folder.path());
  const auto refusal = [&](torch::nn::Module& model, torch::optim::Optimizer* optimizer) {
    TrainingState state = {.mesh = mesh, .model = model, .optimizer = optimizer};
    return message_of([&] { load_training_state(state, step); });
  };
  CHECK(refusal(other, nullptr) ==
        "load_training_state: '" + step +
            "/model.safetensors' does not fit the module, which was not changed. Missing in the file: 'more'. Not in "
            "the module: 'less'. Of another dtype: 'both' is Float in the file and Double in the module. Make the "
            "module as it was when this was saved, or load the weights alone by load_weights, whose options rename, "
            "convert and leave out tensors.");
  const std::string file = "'" + step + "/optimizer.safetensors'";
  torch::optim::AdamW adamw(saved.parameters());
  contains(refusal(saved, &adamw),
           "load_training_state: " + file + " holds the state of 'SGD', the optimizer is AdamW");
  torch::optim::SGD one({saved.parameters()[0]}, torch::optim::SGDOptions(0.1));
  contains(refusal(saved, &one),
           "load_training_state: group 0 of " + file + " has 2 parameters, that of the optimizer 1");
  torch::optim::SGD two({torch::optim::OptimizerParamGroup({saved.parameters()[0]}),
                         torch::optim::OptimizerParamGroup({saved.parameters()[1]})},
                        torch::optim::SGDOptions(0.1));
  contains(refusal(saved, &two), "load_training_state: " + file + " has 1 parameter groups, the optimizer 2");
}

TESSERA_RANKS_TEST_CASE("training state: a mesh that lacks ranks of the model is refused by loading too", {2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  save_training_state(module.state(1), folder.path());
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank + 1 < world()->size(); ++rank) ranks.push_back(rank);
  const DeviceMesh most(world(), c10::kCPU, Mesh({static_cast<int64_t>(ranks.size())}, {"most"}, ranks));
  if (!is_last()) {
    TrainingState state = {.mesh = most, .model = module, .step = 0};
    const std::string step = folder / "step_00000001";
    contains(message_of([&] { load_training_state(state, step); }),
             "load_training_state: tensor 'columns' is on {tp: ");
    contains(message_of([&] { load_newest_training_state(state, folder.path()); }),
             "not within the state's mesh {most: ");
    CHECK(state.step == 0);
  }
}

TESSERA_RANKS_TEST_CASE("training state: a folder that a rank does not see is refused before anything is written",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  // The last rank has another working folder, as another host has a file system of its own.
  const std::filesystem::path before = std::filesystem::current_path();
  const std::string own = folder / (is_last() ? "b" : "a");
  std::filesystem::create_directories(own);
  std::filesystem::current_path(own);
  const std::string text = same_message(mesh, [&] { save_training_state(module.state(1), "states"); });
  std::filesystem::current_path(before);
  contains(text, "rank " + std::to_string(world()->size() - 1) +
                     ": save_training_state: this rank does not see 'states/.step_00000001.tmp-");
  contains(text, "', which rank 0 has just made; save into one folder that all ranks share");
  folder.wait();
  CHECK(std::filesystem::is_empty(folder / "a/states"));
  save_training_state(module.state(1), folder / "shared");  // the ranks can go on
  CHECK(newest_training_state(folder / "shared") == folder / "shared/step_00000001");
}

}  // namespace
}  // namespace tessera

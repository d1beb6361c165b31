// Holds the code of docs/checkpoints.md.

#include <filesystem>
#include <iostream>
#include <string>

#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tests/harness/ranks.h"

namespace {

struct Training {
  tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {tessera::testing::world_size()}, {"tp"});
  Mlp model;
  tessera::Parallelized<Mlp> parallel = tessera::parallelize_module(
      model, mesh, {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(0.01)};
  torch::optim::StepLR scheduler{optimizer, 2, 0.5};
};

std::string folder_of_all_ranks() {
  return std::filesystem::path(tessera::testing::store_path()).parent_path() / "checkpoints";
}

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/checkpoints.md: saved and loaded", {1, 3}) {
  const std::string folder = folder_of_all_ranks();
  {
    Training job;
    auto& [mesh, model, parallel, optimizer, scheduler] = job;
    tessera::TrainingState none = {.mesh = mesh, .model = *model};
    CHECK_FALSE(tessera::load_newest_training_state(none, folder));
    tessera::TrainingState state = {.mesh = mesh,
                                    .model = *model,
                                    .optimizer = &optimizer,
                                    .scheduler = &scheduler,
                                    .step = 100,
                                    .values = {{"epoch", "2"}, {"dropout", "0.1"}}};
    tessera::save_training_state(state, folder, {.keep = 3});
  }
  Training job;
  auto& [mesh, model, parallel, optimizer, scheduler] = job;
  tessera::TrainingState state = {
      .mesh = mesh, .model = *model, .optimizer = &optimizer, .scheduler = &scheduler, .step = 0};
  if (tessera::load_newest_training_state(state, folder))
    std::cout << "going on after step " << state.step << std::endl;
  const std::string epoch = state.values["epoch"];
  CHECK(state.step == 100);
  CHECK(epoch == "2");
  load_training_state(state, folder + "/step_00000100");
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "state.json"})
    CHECK(std::filesystem::exists(folder + "/step_00000100/" + name));
}

TESSERA_RANKS_TEST_CASE("docs/checkpoints.md: while training goes on", {1, 2}) {
  const std::string folder = folder_of_all_ranks();
  const at::Tensor x = torch::ones({2, 16});
  Training job;
  auto& [mesh, model, parallel, optimizer, scheduler] = job;
  tessera::TrainingState state = {
      .mesh = mesh, .model = *model, .optimizer = &optimizer, .scheduler = &scheduler, .step = 0};
  tessera::TrainingStateSaver saver(folder, {.keep = 3});
  for (state.step = 1; state.step <= 6; ++state.step) {
    optimizer.zero_grad();
    parallel(x).square().mean().backward();
    optimizer.step();
    scheduler.step();
    if (state.step % 2 == 0) saver.start(state);
  }
  saver.wait();
  const at::Tensor trained = tessera::full_tensor(model->up->weight.detach());
  for (const int64_t step : {2, 4, 6})
    CHECK(std::filesystem::exists(folder + "/step_0000000" + std::to_string(step) + "/state.json"));
  CHECK(tessera::load_newest_training_state(state, folder));
  CHECK(state.step == 6);
  CHECK(torch::equal(tessera::full_tensor(model->up->weight.detach()), trained));
}

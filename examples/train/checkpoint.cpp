#include "tessera/examples/train/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/weights.h"

namespace train {
namespace {

namespace fs = std::filesystem;

void check_identity(const std::map<std::string, std::string>& saved, const Identity& identity,
                    const std::string& folder) {
  for (const auto& [name, value] : identity) {
    const auto it = saved.find(name);
    const std::string there = it == saved.end() ? "(nothing)" : it->second;
    if (there == value) continue;
    throw std::invalid_argument(
        fmt::format("--resume: the run in '{}' has the {} '{}', but this one has '{}'; give the options that it was "
                    "begun with, or another --run",
                    folder, name, there, value));
  }
}

}  // namespace

std::string checkpoint_folder(const std::string& run, int64_t step) {
  return fmt::format("{}/checkpoints/step_{:08}", run, step);
}

std::optional<int64_t> newest_checkpoint(const std::string& run) {
  std::optional<int64_t> newest;
  if (!fs::is_directory(run + "/checkpoints")) return newest;
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints")) {
    const std::string name = entry.path().filename().string();
    // The weights are written last: a folder that has them is complete.
    if (!name.starts_with("step_") || !fs::exists(entry.path() / "model.safetensors")) continue;
    newest = std::max(newest.value_or(0), static_cast<int64_t>(std::stoll(name.substr(5))));
  }
  return newest;
}

void save_checkpoint(Trainer& trainer, const tessera::DeviceMesh& mesh, const std::string& run, int64_t step,
                     const Identity& identity) {
  const std::string folder = checkpoint_folder(run, step);
  fs::create_directories(folder);
  tessera::save_optimizer(trainer.optimizer(), trainer.module(), folder + "/optimizer.safetensors");
  std::map<std::string, std::string> metadata(identity.begin(), identity.end());
  metadata["format"] = "pt";
  const tessera::RandomState& random = mesh.world().random_state();
  metadata["random seed"] = std::to_string(random.seed);
  metadata["random draws"] = std::to_string(random.counter);
  tessera::save_weights(trainer.module(), folder, {.metadata = metadata});
}

void load_checkpoint(Trainer& trainer, const tessera::DeviceMesh& mesh, const std::string& run, int64_t step,
                     const Identity& identity) {
  const std::string folder = checkpoint_folder(run, step);
  const std::map<std::string, std::string> saved = tessera::Checkpoint(folder).metadata();
  check_identity(saved, identity, folder);
  tessera::load_weights(trainer.module(), folder);
  tessera::load_optimizer(trainer.optimizer(), trainer.module(), folder + "/optimizer.safetensors");
  mesh.world().random_state() = {.seed = std::stoull(saved.at("random seed")),
                                 .counter = std::stoull(saved.at("random draws"))};
}

}  // namespace train

#include "tessera/examples/train/checkpoint.h"

#include <filesystem>
#include <stdexcept>

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/agreement.h"

namespace train {
namespace {

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

tessera::TrainingState state_of(Trainer& trainer, const tessera::DeviceMesh& mesh) {
  return {.mesh = mesh, .model = trainer.module(), .optimizer = &trainer.optimizer()};
}

}  // namespace

Checkpoints::Checkpoints(const std::string& run, int64_t keep)
    : folder_(run + "/checkpoints"), saver_(folder_, {.keep = keep}) {}

std::optional<int64_t> Checkpoints::newest() const {
  if (!std::filesystem::is_directory(folder_)) return std::nullopt;
  const std::optional<std::string> folder = tessera::newest_training_state(folder_);
  if (!folder) return std::nullopt;
  return tessera::read_training_state(*folder).step;
}

void Checkpoints::start(Trainer& trainer, const tessera::DeviceMesh& mesh, int64_t step, const Identity& identity) {
  tessera::TrainingState state = state_of(trainer, mesh);
  state.step = step;
  state.values = identity;
  saver_.start(state);
}

int64_t Checkpoints::load(Trainer& trainer, const tessera::DeviceMesh& mesh, const Identity& identity) const {
  std::string folder;
  tessera::Agreement({mesh}, "train")
      .run(
          [&] {
            folder = tessera::newest_training_state(folder_).value();
            check_identity(tessera::read_training_state(folder).values, identity, folder);
          },
          [&] { return folder; }, "the ranks see different checkpoints; all of them need the same folder");
  tessera::TrainingState state = state_of(trainer, mesh);
  if (!tessera::load_newest_training_state(state, folder_)) {
    throw std::runtime_error(fmt::format("the checkpoints in '{}' were removed while they were looked at", folder_));
  }
  check_identity(state.values, identity, folder_);  // of an older one where the newest is damaged
  return state.step;
}

}  // namespace train

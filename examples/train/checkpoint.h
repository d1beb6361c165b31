#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "tessera/examples/train/trainer.h"
#include "tessera/mesh/device_mesh.h"

namespace train {

// Names what a run is one of, such as its data and its model, by values that must not change when it goes on.
using Identity = std::map<std::string, std::string>;

// Returns "<run>/checkpoints/step_00000100".
std::string checkpoint_folder(const std::string& run, int64_t step);

// Returns the step of the newest complete checkpoint of a run, if there is one. Every rank that sees the folder gets
// the same.
std::optional<int64_t> newest_checkpoint(const std::string& run);

// Saves the model, the optimizer, the random state and the number of steps that are done. All ranks call it; it
// communicates as save_weights and save_optimizer do.
void save_checkpoint(Trainer& trainer, const tessera::DeviceMesh& mesh, const std::string& run, int64_t step,
                     const Identity& identity);

// Loads it, on any mesh. Throws std::invalid_argument, on every rank and before anything has changed, where the run was
// another one than `identity` says; else as load_weights and load_optimizer do.
void load_checkpoint(Trainer& trainer, const tessera::DeviceMesh& mesh, const std::string& run, int64_t step,
                     const Identity& identity);

}  // namespace train

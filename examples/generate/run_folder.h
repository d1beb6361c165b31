#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

#include "tessera/examples/language_model/transformer_options.h"
#include "tessera/mesh/device_mesh.h"

// Reads a folder that examples/train has written: RUN/config.ini, and RUN/checkpoints/step_00000100 for each step that
// was saved.
struct Run {
  TransformerOptions options;
  at::ScalarType dtype = at::kFloat;  // what its weights are saved in: float32, or float64
  int64_t step = 0;
  std::string checkpoint;  // a folder that load_training_state takes
};

// Returns the model's sizes, and the newest whole checkpoint (see newest_training_state) or that of `step`. What is in
// its files is verified when they are loaded. Communication: an agreement of all ranks (see
// Agreement), and one all_reduce of 8 bytes, by which they take the same step even if a run goes on meanwhile.
// Throws, alike on every rank, std::invalid_argument that says what the folder lacks.
Run open_run(const std::string& folder, std::optional<int64_t> step, const tessera::DeviceMesh& mesh);

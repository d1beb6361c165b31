#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/weight_plan.h"
#include "tessera/dtensor/io/weights.h"

namespace tessera {

// Holds a tensor of a module, the plan of the box of it that this rank fills, and what was read of it.
struct WeightSlot {
  at::Tensor target;
  WeightPlan plan;
  int64_t bytes = 0;  // of the file
  at::Tensor piece;
};

// These are the three steps of load_weights. Matching finds the slots of the tensors that this rank holds, in the order
// of their data; it throws std::invalid_argument that begins with `op` and `path` and lists everything that does not
// fit. `given` is nullptr where the user cannot give options; the text then names none. Reading fills the pieces (with
// in_place it writes each to the module at once), and may fail on one rank alone. Writing changes the module.
std::vector<WeightSlot> match_weights(const std::vector<ModuleTensor>& tensors, const Checkpoint& checkpoint,
                                      const std::string& path, const LoadOptions* given, const char* op);
void read_weights(std::vector<WeightSlot>& slots, const Checkpoint& checkpoint, const LoadOptions& options);
void write_weights(std::vector<WeightSlot>& slots);

}  // namespace tessera

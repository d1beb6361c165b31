#pragma once

#include <vector>

#include "tessera/examples/train/report.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace train {

// Returns the layouts that the module's DTensors have, in the order of their first parameters. Parameters have one
// layout if their placements are equal and they have as many dimensions. Does not communicate.
std::vector<ParameterLayout> layouts_of(const torch::nn::Module& module);

}  // namespace train

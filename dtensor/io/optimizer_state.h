#pragma once

#include <string>

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace tessera {

// Saves the state of one of torch::optim's six classes (Adagrad, Adam, AdamW, LBFGS, RMSprop, SGD): the options of the
// parameter groups, and each parameter's state under its path in `module`, as global tensors in one safetensors file:
//   tensors     "<path of the parameter>/<field>", e.g. "layers.0.weight/exp_avg"; counters as 0-d int64
//   __metadata__ "optimizer": "AdamW", "param_groups": JSON with the options and the parameters' paths
// Written beside and renamed, by the rank and with the communication of save_weights; errors as there. A parameter that
// `module` does not have, and any other optimizer class, is std::invalid_argument.
void save_optimizer(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module, const std::string& path);

// Loads what save_optimizer wrote, on any number of ranks and any placements: state that has its parameter's shape
// takes that parameter's layout, other state is replicated, and each rank reads only the bytes that it keeps. The
// optimizer must be of the class that was saved, over the same parameters in the same groups. Its state and options are
// replaced when every rank has read everything; a throw leaves them as they were. Errors as load_weights.
void load_optimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& module, const std::string& path);

}  // namespace tessera

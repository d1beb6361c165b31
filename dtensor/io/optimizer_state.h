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
//   tensors      "<path of the parameter>/<field>", e.g. "layers.0.weight/exp_avg"; counters as 0-d int64
//   __metadata__ "optimizer": "AdamW", "param_groups": JSON with the options and the parameters' paths
// `path` is that file or an existing folder (then optimizer.safetensors in it, beside the weights of save_weights). The
// same rank writes it, with the same renaming, communication and errors as save_weights. Throws
// std::invalid_argument also on a parameter that `module` does not have, on both an assigned parameter and the one that
// it replaces, on any other optimizer class, and on one that is derived from these and whose state or options are of a
// class of its own.
void save_optimizer(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module, const std::string& path);

// Loads what save_optimizer wrote, on any number of ranks and with any placements. State of its parameter's shape gets
// that parameter's layout, other state is replicated, and each rank reads only the bytes that it keeps. The optimizer
// must be of the saved class, over the same parameters in the same groups. Its state and options are replaced when
// every rank has read everything; a throw leaves them unchanged. Throws as load_weights, and std::invalid_argument on
// an optimizer that save_optimizer refuses. In a folder without optimizer.safetensors it takes model.safetensors, as
// earlier versions called it.
void load_optimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& module, const std::string& path);

}  // namespace tessera

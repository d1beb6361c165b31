#pragma once

#include <memory>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// A deep copy of a module, parallelized or not: module.clone() with the hooks of every TESSERA_MODULE in it, which
// LibTorch's clone() leaves behind on all but the root. The copy's parameters are DTensors of their own with the same
// layouts, values and contracts. As with any clone(), tensors tied in the constructor rather than in reset() come
// apart, and while it runs each module's reset() makes whole plain parameters.
// No communication. Throws what clone() throws: the classes must derive from torch::nn::Cloneable.
std::shared_ptr<torch::nn::Module> clone_module(const torch::nn::Module& module);

}  // namespace tessera

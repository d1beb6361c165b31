#pragma once

#include <memory>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// Returns a deep copy of a module, parallelized or not. It is module.clone(), and also keeps the hooks of every
// TESSERA_MODULE in the tree, where LibTorch's clone() keeps only the root's. The copy's parameters are new DTensors
// with the same layouts, values and contracts. As with any clone(), tensors that the constructor (not reset()) tied are
// separate in the copy, and each module's reset() allocates whole plain parameters while clone() runs.
// Does not communicate.
// Throws what clone() throws: the classes must derive from torch::nn::Cloneable.
std::shared_ptr<torch::nn::Module> clone_module(const torch::nn::Module& module);

}  // namespace tessera

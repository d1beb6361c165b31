#pragma once

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// Returns the tensor that a Linear's or Embedding's forward reads as its weight, if it is not the registered "weight";
// else an undefined tensor. `head->weight = tok->weight` ties only the C++ member, and leaves the old tensor
// registered.
at::Tensor assigned_weight(const torch::nn::Module& module);

}  // namespace tessera

#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// A module of ours whose weight is a member that a caller may assign.
class HasWeight {
 public:
  virtual ~HasWeight() = default;
  // Returns the tensor that forward reads as the weight.
  virtual at::Tensor used_weight() const = 0;
};

// Returns the tensor that the forward of a Linear, an Embedding or a HasWeight reads as its weight, if it is not the
// registered "weight"; else an undefined tensor. `head->weight = tok->weight` ties only the C++ member, and leaves the
// old tensor registered.
at::Tensor assigned_weight(const torch::nn::Module& module);

// Returns those of `module` and of the modules in it, by the names of the registered parameters.
std::map<std::string, at::Tensor> assigned_weights(const torch::nn::Module& module);

}  // namespace tessera

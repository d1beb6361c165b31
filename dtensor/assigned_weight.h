#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// A module of ours whose parameters are members that a caller may assign.
class HasParameters {
 public:
  virtual ~HasParameters() = default;
  // Returns the tensors that forward reads as parameters, by name, without undefined ones.
  virtual std::map<std::string, at::Tensor> member_parameters() const = 0;
};

// Returns, by name, those tensors that the forward of a Linear, an Embedding or a HasParameters reads as parameters and
// that are not registered by these names. `head->weight = tok->weight` ties only the C++ member, and leaves the old
// tensor registered; where a layer was made without a bias, none is registered.
std::map<std::string, at::Tensor> assigned_parameters(const torch::nn::Module& module);

// Returns the parameters of `module` and of the modules in it, by name, as their forwards read them: the registered
// ones in order of registration, with an assigned one in the place of that which it replaces, and then the assigned
// ones whose names are not registered.
std::vector<std::pair<std::string, at::Tensor>> used_parameters(const torch::nn::Module& module);

}  // namespace tessera

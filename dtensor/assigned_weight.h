#pragma once

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// `head->weight = tok->weight` ties the member of a Linear or Embedding alone and leaves the old tensor registered as
// "weight". The tensor that forward reads, if it is not the registered one; else an undefined one.
at::Tensor assigned_weight(const torch::nn::Module& module);

}  // namespace tessera

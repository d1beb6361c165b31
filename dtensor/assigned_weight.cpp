#include "tessera/dtensor/assigned_weight.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera {
namespace {

at::Tensor weight_of(const torch::nn::Module& module) {
  if (const auto* linear = module.as<torch::nn::LinearImpl>()) return linear->weight;
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return embedding->weight;
  return {};
}

}  // namespace

at::Tensor assigned_weight(const torch::nn::Module& module) {
  const at::Tensor weight = weight_of(module);
  if (!weight.defined()) return {};
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const registered = parameters.find("weight");
  return registered == nullptr || registered->is_same(weight) ? at::Tensor() : weight;
}

}  // namespace tessera

#include "tessera/dtensor/assigned_weight.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera {
namespace {

at::Tensor weight_of(const torch::nn::Module& module) {
  if (const auto* linear = module.as<torch::nn::LinearImpl>()) return linear->weight;
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return embedding->weight;
  if (const auto* own = dynamic_cast<const HasWeight*>(&module)) return own->used_weight();
  return {};
}

void find_assigned(const torch::nn::Module& module, const std::string& prefix,
                   std::map<std::string, at::Tensor>& found) {
  const at::Tensor weight = assigned_weight(module);
  if (weight.defined()) found.emplace(prefix + "weight", weight);
  for (const auto& child : module.named_children()) find_assigned(*child.value(), prefix + child.key() + ".", found);
}

}  // namespace

at::Tensor assigned_weight(const torch::nn::Module& module) {
  const at::Tensor weight = weight_of(module);
  if (!weight.defined()) return {};
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const registered = parameters.find("weight");
  return registered == nullptr || registered->is_same(weight) ? at::Tensor() : weight;
}

std::map<std::string, at::Tensor> assigned_weights(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> found;
  find_assigned(module, "", found);
  return found;
}

}  // namespace tessera

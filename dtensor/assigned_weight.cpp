#include "tessera/dtensor/assigned_weight.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera {
namespace {

std::map<std::string, at::Tensor> members_of(const torch::nn::Module& module) {
  if (const auto* linear = module.as<torch::nn::LinearImpl>())
    return {{"weight", linear->weight}, {"bias", linear->bias}};
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return {{"weight", embedding->weight}};
  if (const auto* own = dynamic_cast<const HasParameters*>(&module)) return own->member_parameters();
  return {};
}

void find_assigned(const torch::nn::Module& module, const std::string& prefix,
                   std::map<std::string, at::Tensor>& found) {
  for (const auto& [name, tensor] : assigned_parameters(module)) found.emplace(prefix + name, tensor);
  for (const auto& child : module.named_children()) find_assigned(*child.value(), prefix + child.key() + ".", found);
}

}  // namespace

std::map<std::string, at::Tensor> assigned_parameters(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> assigned = members_of(module);
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto buffers = module.named_buffers(/*recurse=*/false);
  std::erase_if(assigned, [&](const auto& item) {
    const at::Tensor* const registered = parameters.find(item.first);
    const bool is_own = registered != nullptr && registered->is_same(item.second);
    return !item.second.defined() || is_own || buffers.contains(item.first);
  });
  return assigned;
}

std::vector<std::pair<std::string, at::Tensor>> used_parameters(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> assigned;
  find_assigned(module, "", assigned);
  std::vector<std::pair<std::string, at::Tensor>> used;
  for (const auto& item : module.named_parameters()) {
    const auto in_its_place = assigned.extract(item.key());
    used.emplace_back(item.key(), in_its_place.empty() ? item.value() : in_its_place.mapped());
  }
  used.insert(used.end(), assigned.begin(), assigned.end());
  return used;
}

}  // namespace tessera

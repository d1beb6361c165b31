#include "tessera/styles/module_tree.h"

#include <fnmatch.h>

#include <algorithm>
#include <string>
#include <string_view>

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/assigned_weight.h"

namespace tessera {
namespace {

// Returns the name of the module's class. A TESSERA_MODULE is a tessera::Hooked<BlockImpl>; the user wrote BlockImpl.
std::string type_of(const torch::nn::Module& module) {
  constexpr std::string_view kHooked = "tessera::Hooked<";
  std::string_view type = module.name();
  if (!type.starts_with(kHooked) || !type.ends_with('>')) return std::string(type);
  type.remove_prefix(kHooked.size());
  type.remove_suffix(1);
  while (type.ends_with(' ')) type.remove_suffix(1);  // "Hooked<Pair<int> >"
  return std::string(type);
}

void note_kind(ModuleNode& node) {
  if (node.module->as<torch::nn::LinearImpl>() != nullptr) {
    node.kind = ModuleKind::kLinear;
  } else if (const auto* embedding = node.module->as<torch::nn::EmbeddingImpl>()) {
    node.kind = ModuleKind::kEmbedding;
    node.renormalizes = embedding->options.max_norm().has_value();
    node.sparse_gradient = embedding->options.sparse();
  } else if (const auto* bag = node.module->as<torch::nn::EmbeddingBagImpl>()) {
    node.sparse_gradient = bag->options.sparse();
  } else if (const auto* attention = node.module->as<torch::nn::MultiheadAttentionImpl>()) {
    node.kind = ModuleKind::kAttention;
    node.embed_dim = attention->options.embed_dim();
    node.num_heads = attention->options.num_heads();
  } else if (is_conv1d(std::string_view(node.type).substr(node.type.rfind(':') + 1), node)) {
    node.kind = ModuleKind::kConv1D;
  }
}

std::size_t add_module(ModuleTree& tree, torch::nn::Module& module, const std::string& path) {
  const std::size_t index = tree.size();
  ModuleNode& node = tree.emplace_back();
  node.path = path;
  node.type = type_of(module);
  node.module = &module;
  node.identity = &module;
  for (const auto& [name, tensor] : assigned_parameters(module)) {
    node.tensors.push_back({.name = name, .tensor = tensor, .is_parameter = true});
  }
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    node.tensors.push_back({.name = item.key(), .tensor = item.value(), .is_parameter = true});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    node.tensors.push_back({.name = item.key(), .tensor = item.value(), .is_parameter = false});
  }
  note_kind(node);
  for (const auto& item : module.named_children()) {
    const std::size_t child = add_module(tree, *item.value(), joined_path(path, item.key()));
    tree[index].children.emplace_back(item.key(), child);
  }
  return index;
}

std::vector<std::string> parts_of(const std::string& pattern) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (std::size_t dot = pattern.find('.'); dot != std::string::npos; dot = pattern.find('.', begin)) {
    parts.push_back(pattern.substr(begin, dot - begin));
    begin = dot + 1;
  }
  parts.push_back(pattern.substr(begin));
  return parts;
}

}  // namespace

std::string shown_path(const std::string& path) { return path.empty() ? "the root module" : path; }

std::string joined_path(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

bool is_conv1d(std::string_view class_name, const ModuleNode& node) {
  if (class_name != "Conv1D" && class_name != "Conv1DImpl") return false;
  const auto find = [&](std::string_view name) {
    const auto found = std::ranges::find(node.tensors, name, &NamedTensor::name);
    return found == node.tensors.end() ? at::Tensor() : found->tensor;
  };
  const at::Tensor weight = find("weight"), bias = find("bias");
  return weight.defined() && weight.dim() == 2 && (!bias.defined() || bias.sizes() == weight.sizes().slice(1));
}

ModuleTree tree_of(torch::nn::Module& root) {
  ModuleTree tree;
  add_module(tree, root, "");
  return tree;
}

std::vector<std::size_t> match(const ModuleTree& tree, const std::string& pattern) {
  std::vector<std::size_t> found = {0};
  if (pattern.empty()) return found;
  for (const std::string& part : parts_of(pattern)) {
    std::vector<std::size_t> next;
    for (const std::size_t index : found) {
      for (const auto& [name, child] : tree[index].children) {
        if (::fnmatch(part.c_str(), name.c_str(), 0) == 0) next.push_back(child);
      }
    }
    found = std::move(next);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string pattern_of(const std::string& path) {
  std::string pattern;
  for (const char c : path) {
    if (std::string_view("*?[]\\").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

}  // namespace tessera

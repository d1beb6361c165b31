#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// What a module is to a style. kLinear, kEmbedding and kAttention (MultiheadAttention) are those of torch::nn, or of
// torch.nn in TorchScript, and classes derived from them; kConv1D is GPT-2's linear layer, x W + b: a class called
// Conv1D, or Conv1DImpl, whose weight is a matrix and whose bias, if it has one, has an element per column.
enum class ModuleKind { kLinear, kEmbedding, kAttention, kConv1D, kOther };

struct NamedTensor {
  std::string name;  // within its module, such as "weight"
  at::Tensor tensor;
  bool is_parameter = true;  // else a buffer
};

// One module as plans see it: its place in the tree and what it owns itself.
struct ModuleNode {
  std::string path;  // "layers.0.attn"; "" is the root
  std::string type;  // "torch::nn::LinearImpl"
  ModuleKind kind = ModuleKind::kOther;
  int64_t embed_dim = 0;                // of an attention
  int64_t num_heads = 0;                // of an attention; 0: a traced one, whose code does not say
  bool renormalizes = false;            // an embedding with max_norm, which rewrites its rows in forward
  torch::nn::Module* module = nullptr;  // nullptr: a torch::jit::Module
  const void* identity = nullptr;       // the same for a module with two names
  // Defined ones, parameters first. A Linear's or Embedding's "weight" that was assigned, so that it is not the
  // registered one, comes before that.
  std::vector<NamedTensor> tensors;
  std::vector<std::pair<std::string, std::size_t>> children;  // name, index in the tree
};

// A module and everything below it, parents before children, in the order of registration. A module that is registered
// under two names stands there twice.
using ModuleTree = std::vector<ModuleNode>;

// Whether a module whose class has that name and whose own tensors stand in `node` is a ModuleKind::kConv1D.
bool is_conv1d(std::string_view class_name, const ModuleNode& node);
ModuleTree tree_of(torch::nn::Module& root);

// The indices of the modules whose path matches `pattern`: each dotted part is matched with fnmatch (*, ?, [..])
// against the names of direct children, so that a * never crosses a dot; "" is the root. In the order of the tree.
//   "layers.*.attn.w?" -> layers.0.attn.wq, layers.0.attn.wk, layers.1.attn.wq, ...
std::vector<std::size_t> match(const ModuleTree& tree, const std::string& pattern);

// "layers.0.attn", or "the root module".
std::string shown_path(const std::string& path);
// "layers.0.attn" + "weight" -> "layers.0.attn.weight"
std::string joined_path(const std::string& path, const std::string& name);

}  // namespace tessera

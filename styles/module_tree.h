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

// Tells a style what a module is. kLinear, kEmbedding and kAttention (MultiheadAttention) are the classes of torch::nn,
// classes derived from them, and the classes of torch.nn in TorchScript. kConv1D is GPT-2's linear layer, x W + b: a
// class called Conv1D or Conv1DImpl whose weight is a matrix and whose bias, if any, has one element per column of it.
enum class ModuleKind { kLinear, kEmbedding, kAttention, kConv1D, kOther };

struct NamedTensor {
  std::string name;  // within its module, such as "weight"
  at::Tensor tensor;
  bool is_parameter = true;  // false: a buffer
};

// Describes one module to plans: its place in the tree, and its own tensors without its children's.
struct ModuleNode {
  std::string path;  // "layers.0.attn"; "" is the root
  std::string type;  // "torch::nn::LinearImpl"; of a TESSERA_MODULE the class that the user wrote
  ModuleKind kind = ModuleKind::kOther;
  int64_t embed_dim = 0;                // set for kAttention only
  int64_t num_heads = 0;                // set for kAttention only; 0: a traced module, whose code does not say
  bool renormalizes = false;            // true for an embedding with max_norm, which rewrites rows in forward
  bool sparse_gradient = false;         // true for an Embedding or EmbeddingBag with sparse(true)
  torch::nn::Module* module = nullptr;  // nullptr for a torch::jit::Module
  const void* identity = nullptr;       // a module registered under two names has the same one in both nodes
  // Lists the defined tensors, parameters first. Where a member of a Linear, an Embedding or a named layer was assigned
  // another tensor than the registered one, the assigned tensor comes before the registered one.
  std::vector<NamedTensor> tensors;
  std::vector<std::pair<std::string, std::size_t>> children;  // name, index in the tree
};

// Lists a module and all modules below it, parents before children, in the order of registration. A module that is
// registered under two names has two nodes.
using ModuleTree = std::vector<ModuleNode>;

// Says whether the module with this class name and the tensors of `node` is a ModuleKind::kConv1D.
bool is_conv1d(std::string_view class_name, const ModuleNode& node);
ModuleTree tree_of(torch::nn::Module& root);

// Returns the indices, in the order of the tree, of the modules whose path matches `pattern`. Each dotted part is
// matched with fnmatch (*, ?, [..]) against the names of direct children, so that a * never crosses a dot; "" is the
// root.
//   "layers.*.attn.w?" -> layers.0.attn.wq, layers.0.attn.wk, layers.1.attn.wq, ...
std::vector<std::size_t> match(const ModuleTree& tree, const std::string& pattern);
// Returns the pattern that matches this path alone, whatever characters a name has: fc[1] -> fc\[1\].
std::string pattern_of(const std::string& path);

// Returns the path, or "the root module" for "".
std::string shown_path(const std::string& path);
// Joins a path and a name: "layers.0.attn" + "weight" -> "layers.0.attn.weight".
std::string joined_path(const std::string& path, const std::string& name);

}  // namespace tessera

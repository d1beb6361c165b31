#include "tessera/styles/script_module.h"

#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/styles/script_code.h"

namespace tessera {
namespace {

using torch::jit::Module;

// "__torch__.torch.nn.modules.linear.___torch_mangle_3.Linear" -> "torch.nn.modules.linear.Linear"
std::string type_of(const Module& module) {
  const auto name = module.type()->name();
  std::string out;
  for (const std::string& atom : name ? name->atoms() : std::vector<std::string>{"(unnamed)"}) {
    if (atom == "__torch__" || atom.starts_with("___torch_mangle_")) continue;
    out += (out.empty() ? "" : ".") + atom;
  }
  return out;
}

// Returns the number in a node's input, or 0 where it is no constant.
int64_t constant_in(const torch::jit::Node& node, std::size_t input) {
  const auto value = torch::jit::toIValue(node.input(input));
  if (!value || !(value->isTensor() || value->isInt())) return 0;
  return value->isInt() ? value->toInt() : value->toTensor().item<int64_t>();
}

// Returns the number of heads that the code of a traced MultiheadAttention, which has no attributes, or of a traced
// encoder layer with one tells: that of LibTorch's operators for inference, or that by which the features are divided
// with a rounding mode. Returns 0 where there is no such constant, or several that differ.
int64_t traced_heads(const Module& module, int64_t embed_dim) {
  static const auto kAttention = c10::Symbol::fromQualString("aten::_native_multi_head_attention");
  static const auto kEncoderLayer = c10::Symbol::fromQualString("aten::_transformer_encoder_layer_fwd");
  const auto forward = module.find_method("forward");
  if (!forward) return 0;
  int64_t found = 0;
  for (const torch::jit::Node* node : forward->graph()->block()->nodes()) {
    const bool divides = node->kind() == c10::aten::div && node->inputs().size() == 3;
    if (!divides && node->kind() != kAttention && node->kind() != kEncoderLayer) continue;
    const int64_t heads = constant_in(*node, divides ? 1 : node->kind() == kAttention ? 4 : 2);
    if (heads == 0 && divides) continue;
    if (heads < 1 || embed_dim % heads != 0 || (found != 0 && found != heads)) return 0;
    found = heads;
  }
  return found;
}

// Returns an option that the module was made with, which is a constant or an attribute of it; None where it has
// neither.
at::IValue option_of(const Module& module, const std::string& name) {
  const auto constant = module.type()->findConstant(name);
  if (constant) return *constant;
  return module.hasattr(name) ? module.attr(name) : at::IValue();
}

void note_attention(ModuleNode& node, const Module& module) {
  node.kind = ModuleKind::kAttention;
  node.embed_dim = module.attr("out_proj").toModule().attr("weight").toTensor().size(0);
  const at::IValue heads = option_of(module, "num_heads");
  if (!heads.isNone()) {
    node.num_heads = heads.toInt();
  } else {
    node.num_heads = traced_heads(module, node.embed_dim);
  }
}

bool is_sparse(const Module& module) {
  const at::IValue sparse = option_of(module, "sparse");
  return sparse.isBool() && sparse.toBool();
}

void note_kind(ModuleNode& node, const Module& module) {
  if (node.type == "torch.nn.modules.linear.Linear" ||
      node.type == "torch.nn.modules.linear.NonDynamicallyQuantizableLinear") {
    node.kind = ModuleKind::kLinear;
  } else if (node.type == "torch.nn.modules.sparse.Embedding") {
    node.kind = ModuleKind::kEmbedding;
    node.renormalizes = !option_of(module, "max_norm").isNone();
    node.sparse_gradient = is_sparse(module);
  } else if (node.type == "torch.nn.modules.sparse.EmbeddingBag") {
    node.sparse_gradient = is_sparse(module);
  } else if (node.type == "torch.nn.modules.activation.MultiheadAttention") {
    note_attention(node, module);
  } else if (is_conv1d(std::string_view(node.type).substr(node.type.rfind('.') + 1), node)) {
    node.kind = ModuleKind::kConv1D;
  }
}

std::size_t add_module(ModuleTree& tree, const Module& module, const std::string& path) {
  const std::size_t index = tree.size();
  ModuleNode& node = tree.emplace_back();
  node.path = path;
  node.type = type_of(module);
  node.identity = module._ivalue().get();
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    node.tensors.push_back({.name = item.name, .tensor = item.value, .is_parameter = true});
  }
  // named_buffers leaves out those whose declared type is Optional[Tensor].
  for (std::size_t i = 0; i < module.type()->numAttributes(); ++i) {
    const at::IValue value = module._ivalue()->getSlot(i);
    if (!module.type()->is_buffer(i) || !value.isTensor() || !value.toTensor().defined()) continue;
    node.tensors.push_back(
        {.name = module.type()->getAttributeName(i), .tensor = value.toTensor(), .is_parameter = false});
  }
  note_kind(node, module);
  for (const auto& item : module.named_children()) {
    const std::size_t child = add_module(tree, item.value, joined_path(path, item.name));
    // A layer that was traced in eval() calls one operator, and its attention has no code.
    if (tree[child].kind == ModuleKind::kAttention && tree[child].num_heads == 0) {
      tree[child].num_heads = traced_heads(module, tree[child].embed_dim);
    }
    tree[index].children.emplace_back(item.name, child);
  }
  return index;
}

ModuleTree modules_of(const Module& root) {
  ModuleTree tree;
  add_module(tree, root, "");
  return tree;
}

void see(detail::BatchCheck& batch, const at::IValue& argument) {
  if (argument.isTensor()) {
    batch.see(argument.toTensor());
  } else if (argument.isTuple()) {
    for (const at::IValue& each : argument.toTupleRef().elements()) see(batch, each);
  } else if (argument.isList()) {
    for (const at::IValue& each : argument.toListRef()) see(batch, each);
  } else if (argument.isGenericDict()) {
    for (const auto& each : argument.toGenericDict()) see(batch, each.value());
  } else if (argument.isObject()) {
    batch.see_unknown();
  }
}

void check_compute_dtype(const ScriptCode& code, const ParallelizeOptions& options) {
  if (!options.compute_dtype || !code.has_autocast) return;
  throw std::invalid_argument(
      fmt::format("parallelize_module: compute_dtype {} for a TorchScript module whose code has blocks of the kind "
                  "\"with torch.autocast(...)\", which say themselves what is computed in which dtype; leave "
                  "compute_dtype out, or script the module without these blocks",
                  c10::toString(*options.compute_dtype)));
}

void check_batch(const std::vector<at::IValue>& inputs, const torch::jit::Kwargs& named,
                 const std::string& split_mesh) {
  detail::BatchCheck batch;
  for (const at::IValue& input : inputs) see(batch, input);
  for (const auto& each : named) see(batch, each.second);
  batch.check(split_mesh);
}

}  // namespace

std::shared_ptr<torch::nn::Module> weights_of(const Module& module) {
  const ModuleTree tree = tree_of(module);
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::set<const void*> seen;
  for (const ModuleNode& node : tree) {
    modules.push_back(std::make_shared<torch::nn::Module>(node.type));
    for (const auto& [name, tensor, is_parameter] : node.tensors) {
      // register_parameter sets requires_grad, which an inference tensor takes in inference mode alone.
      const c10::InferenceMode inference(c10::InferenceMode::is_enabled() || tensor.is_inference());
      if (is_parameter && seen.insert(tensor.unsafeGetTensorImpl()).second) {
        modules.back()->register_parameter(name, tensor, tensor.requires_grad());
      } else {
        modules.back()->register_buffer(name, tensor);
      }
    }
  }
  for (std::size_t i = 0; i < tree.size(); ++i) {
    for (const auto& [name, child] : tree[i].children) modules[i]->register_module(name, modules[child]);
  }
  return modules.front();
}

ModuleTree tree_of(const Module& root) {
  read_code(root);
  return modules_of(root);
}

namespace {

// Returns what `call` returns, in the modes in which parallelized code runs.
at::IValue run_parallel(const detail::Calling& calling, const std::vector<at::IValue>& inputs,
                        const torch::jit::Kwargs& named, c10::function_ref<at::IValue()> call) {
  if (!calling.split_mesh.empty() && !c10::InferenceMode::is_enabled()) check_batch(inputs, named, calling.split_mesh);
  const ImplicitReplication guard;
  const detail::ComputeIn autocast(calling.compute);
  const torch::jit::GraphOptimizerEnabledGuard unoptimized(false);
  return call();
}

}  // namespace

at::IValue ParallelizedScript::call(std::vector<at::IValue> inputs) {
  return run_parallel(calling_, inputs, {}, [&] { return module_(std::move(inputs)); });
}

at::IValue ParallelizedScript::run_method(const std::string& name, std::vector<at::IValue> inputs,
                                          const torch::jit::Kwargs& named) {
  return run_parallel(calling_, inputs, named, [&] { return module_.get_method(name)(std::move(inputs), named); });
}

at::IValue ParallelizedScript::forward(std::vector<at::IValue> inputs, const torch::jit::Kwargs& named) {
  return run_method("forward", std::move(inputs), named);
}

ParallelizedScript parallelize_module(const Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                                      const ParallelizeOptions& options) {
  const auto tree = [&] {
    const ScriptCode code = read_code(module);
    ModuleTree made = modules_of(module);
    check_compute_dtype(code, options);
    run_as_written(code);  // before anything is converted; it stays so where the plan is refused
    return made;
  };
  return ParallelizedScript(
      module, detail::parallelize(detail::Subject{.tree = tree, .plan = [&] { return plan; }}, mesh, options));
}

}  // namespace tessera

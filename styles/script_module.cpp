#include "tessera/styles/script_module.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include "tessera/dtensor/core/modes.h"

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

// ---- Signs of freezing and optimizing

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw std::invalid_argument(
      fmt::format("parallelize_module: {} is a frozen, optimized or quantized TorchScript module ({}): its weights are "
                  "constants of its code or packed, so no style can lay them out. Load the module as it was before "
                  "torch.jit.freeze, optimize_for_inference, optimize_for_mobile or its quantization, and parallelize "
                  "that",
                  shown_path(path), what));
}

// Says whether an optimizer puts this operator in the place of LibTorch's own, with weights packed for it.
bool is_packed(std::string_view name) {
  constexpr std::array kNamespaces = {"mkldnn", "mkldnn_prepacked", "prepacked", "quantized", "xnnpack", "tensorexpr"};
  for (const std::string_view space : kNamespaces) {
    if (name.starts_with(space) && name.substr(space.size()).starts_with("::")) return true;
  }
  return name == "aten::to_mkldnn" || name == "prim::ConstantMKLDNNTensor";
}

// Returns the function that a node calls, or nullptr: one without a module, or a method of a module or another class.
torch::jit::Function* called_by(const torch::jit::Node& node) {
  if (node.kind() == c10::prim::CallFunction) {
    const auto type = node.input(0)->type()->cast<c10::FunctionType>();
    return type == nullptr ? nullptr : type->function();
  }
  if (node.kind() != c10::prim::CallMethod) return nullptr;
  const auto type = node.input(0)->type()->cast<c10::ClassType>();
  return type == nullptr ? nullptr : type->findMethod(node.s(c10::attr::name));
}

// Returns a module's methods and hooks.
std::vector<torch::jit::Function*> functions_of(const Module& module) {
  std::vector<torch::jit::Function*> out;
  for (const auto& method : module.get_methods()) out.push_back(&method.function());
  for (const auto* hooks : {&module.type()->getForwardPreHooks(), &module.type()->getForwardHooks()}) {
    out.insert(out.end(), hooks->begin(), hooks->end());
  }
  return out;
}

using Functions = std::set<torch::jit::GraphFunction*>;
using SeeNode = c10::function_ref<void(const torch::jit::Node&)>;

// Calls `see` with each node of a function, and of those that it calls, and adds them to `seen`. Functions that are in
// `seen` already are left out.
void each_node(const torch::jit::Block& block, Functions& seen, SeeNode see);
void each_node(torch::jit::Function* function, Functions& seen, SeeNode see) {
  torch::jit::GraphFunction* const code = function == nullptr ? nullptr : torch::jit::tryToGraphFunction(*function);
  if (code != nullptr && seen.insert(code).second) each_node(*code->graph()->block(), seen, see);
}
void each_node(const torch::jit::Block& block, Functions& seen, SeeNode see) {
  for (const torch::jit::Node* node : block.nodes()) {
    see(*node);
    each_node(called_by(*node), seen, see);
    for (const torch::jit::Block* inner : node->blocks()) each_node(*inner, seen, see);
  }
}

// Checks the code of modules, with what it calls, each function once.
class CodeCheck {
 public:
  explicit CodeCheck(bool weights_may_be_constants) : weights_may_be_constants_(weights_may_be_constants) {}

  void check(const std::string& path, const Module& module) {
    path_ = path;
    for (torch::jit::Function* const function : functions_of(module)) {
      each_node(function, seen_, [this](const torch::jit::Node& node) { check(node); });
    }
  }

 private:
  void check(const torch::jit::Node& node) const {
    const std::string name = node.kind().toQualString();
    if (is_packed(name)) refuse(path_, "it calls " + name);
    if (name == "prim::fork") {
      throw std::invalid_argument("parallelize_module: " + (path_.empty() ? std::string("the module") : path_) +
                                  " calls torch.jit.fork: the ranks would start the collectives of its threads in "
                                  "different orders; call the function without fork");
    }
    if (weights_may_be_constants_ && name == "prim::Constant" && node.hasAttribute(c10::attr::value) &&
        node.kindOf(c10::attr::value) == torch::jit::AttributeKind::t) {
      const at::Tensor constant = node.t(c10::attr::value);
      if (constant.dim() > 0 && constant.is_floating_point())
        refuse(path_,
               "it has no parameters or no attribute called training, and a tensor of numbers among its constants");
    }
  }

  std::string path_;
  const bool weights_may_be_constants_;
  Functions seen_;
};

// Says whether an attribute is an object in which LibTorch's passes pack weights. Other classes of C++, such as a
// vocabulary, hold none.
bool is_packed(const at::IValue& value) {
  static constexpr std::array<std::string_view, 7> kNamespaces = {"quantized", "rnn",   "sparse", "xnnpack",
                                                                  "mkldnn",    "metal", "vulkan"};
  if (!value.isCustomClass()) return false;
  const std::string name = value.type()->repr_str();
  return std::ranges::any_of(kNamespaces, [&](std::string_view each) {
    return name.find(fmt::format("torch.classes.{}.", each)) != std::string::npos;
  });
}

void check_unfrozen(const Module& root) {
  // Freezing drops the attribute called training and turns parameters into constants. A module made by hand may have
  // neither.
  const bool bare = !root.hasattr("training") || root.named_parameters(/*recurse=*/true).size() == 0;
  std::vector<std::pair<std::string, Module>> modules;  // backwards, the innermost that calls something comes first
  for (const auto& item : root.named_modules()) {
    for (const auto& attribute : item.value.named_attributes(/*recurse=*/false)) {
      if (is_packed(attribute.value)) refuse(item.name, "its attribute " + attribute.name + " holds packed weights");
    }
    modules.emplace_back(item.name, item.value);
  }
  CodeCheck code(bare);
  for (auto module = modules.rbegin(); module != modules.rend(); ++module) code.check(module->first, module->second);
}

// Returns the compiled code of a function, one entry per setting of autocast, empty where nothing is compiled. LibTorch
// has no way to ask for it: get_executor would compile what is missing, and LibTorch's pass for autocast crashes on
// some functions, such as a MultiheadAttention's.
using Executors = std::array<std::optional<torch::jit::GraphExecutor>, 4>;
using Mode = std::optional<torch::jit::ExecutorExecutionMode>;
Executors& executors_of(torch::jit::GraphFunction& function);
template <Executors torch::jit::GraphFunction::*Member>
struct Reach {
  friend Executors& executors_of(torch::jit::GraphFunction& function) { return function.*Member; }
};
template struct Reach<&torch::jit::GraphFunction::executors_>;
// Likewise the mode in which a function is compiled, and the mutex that guards both.
Mode& mode_of(torch::jit::GraphFunction& function);
template <Mode torch::jit::GraphFunction::*Member>
struct ReachMode {
  friend Mode& mode_of(torch::jit::GraphFunction& function) { return function.*Member; }
};
template struct ReachMode<&torch::jit::GraphFunction::executor_execution_mode_>;
std::recursive_mutex& mutex_of(torch::jit::GraphFunction& function);
template <std::recursive_mutex torch::jit::GraphFunction::*Member>
struct ReachMutex {
  friend std::recursive_mutex& mutex_of(torch::jit::GraphFunction& function) { return function.*Member; }
};
template struct ReachMutex<&torch::jit::GraphFunction::compile_mutex>;

// Drops the compiled code of a function; without `again`, unless this was done before. A thread may be inside of it, so
// it stays alive.
void forget_compiled(torch::jit::GraphFunction& function, bool again) {
  static auto* const dropped = new std::vector<torch::jit::GraphExecutor>();
  static std::mutex of_dropped;
  const std::lock_guard compiling(mutex_of(function));
  if (mode_of(function) == torch::jit::SIMPLE && !again) return;
  for (auto& executor : executors_of(function)) {
    if (!executor) continue;
    const std::lock_guard lock(of_dropped);
    dropped->push_back(*executor);
    executor.reset();
  }
  function.clear_optimized_graphs();
  function._set_initial_executor_execution_mode(torch::jit::SIMPLE);
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

// Says whether a node begins a block of the kind "with torch.autocast(...)".
bool begins_autocast(const torch::jit::Node& node) {
  if (node.kind() != c10::prim::Enter) return false;
  const auto type = node.input(0)->type()->cast<c10::ClassType>();
  const auto name = type == nullptr ? std::nullopt : type->name();
  return name && name->qualifiedName().ends_with(".autocast_mode.autocast");
}

struct Code {
  Functions functions;  // those of a module, and what they call
  bool has_autocast = false;
};

Code code_of(const Module& root) {
  Code code;
  for (const auto& item : root.named_modules()) {
    for (torch::jit::Function* const each : functions_of(item.value)) {
      each_node(each, code.functions,
                [&](const torch::jit::Node& node) { code.has_autocast = code.has_autocast || begins_autocast(node); });
    }
  }
  return code;
}

// Makes functions run as they are written, which the optimizer would change: from now on, also where the module itself
// or a copy of it, which shares them, is called. Operators see autocast as they do elsewhere. Where the code itself
// switches autocast, LibTorch writes casts into it, which it does only while the optimizer is on.
void forget_compiled(const Code& code) {
  for (torch::jit::GraphFunction* const each : code.functions) forget_compiled(*each, /*again=*/code.has_autocast);
  if (!code.has_autocast) return;
  detail::AutocastSettings off = detail::autocast_settings();
  off.cpu.is_on = off.cuda.is_on = false;
  const detail::WithAutocast without(off);
  const torch::jit::GraphOptimizerEnabledGuard optimized(true);
  for (torch::jit::GraphFunction* const each : code.functions) {
    const std::lock_guard compiling(mutex_of(*each));
    try {
      each->optimized_graph();
    } catch (const std::exception& error) {
      each->clear_optimized_graphs();  // else the half-made one would be taken the next time
      throw std::invalid_argument(fmt::format(
          "parallelize_module: LibTorch cannot compile the blocks of autocast in {}, so that they would have no "
          "effect: "
          "{}. Give torch.autocast constants, such as attributes that are Final, or script the module without the "
          "function",
          each->qualname().qualifiedName(), first_line(error.what())));
    }
  }
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

void check_compute_dtype(const Code& code, const ParallelizeOptions& options) {
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
  check_unfrozen(root);
  ModuleTree tree;
  add_module(tree, root, "");
  return tree;
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
    ModuleTree made = tree_of(module);
    const Code code = code_of(module);
    check_compute_dtype(code, options);
    forget_compiled(code);  // before anything is converted; it stays so where the plan is refused
    return made;
  };
  return ParallelizedScript(
      module, detail::parallelize(detail::Subject{.tree = tree, .plan = [&] { return plan; }}, mesh, options));
}

}  // namespace tessera

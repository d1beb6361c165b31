#include "tessera/styles/script_code.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include "tessera/styles/compute_dtype.h"
#include "tessera/styles/module_tree.h"

namespace tessera {
namespace {

using torch::jit::Module;

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

// Says whether a node begins a block of the kind "with torch.autocast(...)".
bool begins_autocast(const torch::jit::Node& node) {
  if (node.kind() != c10::prim::Enter) return false;
  const auto type = node.input(0)->type()->cast<c10::ClassType>();
  const auto name = type == nullptr ? std::nullopt : type->name();
  return name && name->qualifiedName().ends_with(".autocast_mode.autocast");
}

// Says whether a constant is a tensor of floating-point numbers, or has one among its elements.
bool holds_numbers(const at::IValue& value) {
  bool found = false;
  value.visit([&](const at::IValue& each) {
    if (each.isTensor()) found |= each.toTensor().dim() > 0 && each.toTensor().is_floating_point();
    return found;
  });
  return found;
}

// Reads and checks the code of modules, with what it calls, each function once.
class CodeReader {
 public:
  explicit CodeReader(bool weights_may_be_constants) : weights_may_be_constants_(weights_may_be_constants) {}

  void read(const std::string& path, const Module& module) {
    path_ = path;
    for (torch::jit::Function* const function : functions_of(module)) {
      each_node(function, code_.functions, [this](const torch::jit::Node& node) {
        check(node);
        code_.has_autocast = code_.has_autocast || begins_autocast(node);
      });
    }
  }

  ScriptCode take() { return std::move(code_); }

 private:
  void check(const torch::jit::Node& node) const {
    const std::string name = node.kind().toQualString();
    if (is_packed(name)) refuse(path_, "it calls " + name);
    if (name == "prim::fork") {
      throw std::invalid_argument("parallelize_module: " + (path_.empty() ? std::string("the module") : path_) +
                                  " calls torch.jit.fork: the ranks would start the collectives of its threads in "
                                  "different orders; call the function without fork");
    }
    if (!weights_may_be_constants_ || node.kind() != c10::prim::Constant) return;
    const std::optional<at::IValue> value = torch::jit::toIValue(node.output());
    if (value && holds_numbers(*value)) {
      refuse(path_,
             "it has no parameters or no attribute called training, and a tensor of numbers among its constants");
    }
  }

  std::string path_;
  const bool weights_may_be_constants_;
  ScriptCode code_;
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

// Reaches private members of a function, for which LibTorch has no way to ask.
template <class Member>
struct Of {};
template <class T, T torch::jit::GraphFunction::*Member>
struct Reach {
  friend T& reach(torch::jit::GraphFunction& function, Of<T> /*chooses the member*/) { return function.*Member; }
};

// Is the compiled code, one entry per setting of autocast, empty where nothing is compiled. get_executor would compile
// what is missing, and LibTorch's pass for autocast crashes on some functions, such as a MultiheadAttention's.
using Executors = std::array<std::optional<torch::jit::GraphExecutor>, 4>;
Executors& reach(torch::jit::GraphFunction& function, Of<Executors> member);
template struct Reach<Executors, &torch::jit::GraphFunction::executors_>;

// Is the graphs that are compiled, made of graph() where there is none yet. The first is for autocast that is off.
using Graphs = std::array<std::shared_ptr<torch::jit::Graph>, 4>;
Graphs& reach(torch::jit::GraphFunction& function, Of<Graphs> member);
template struct Reach<Graphs, &torch::jit::GraphFunction::optimized_graphs_>;

// Is the mode in which a function is compiled.
using Mode = std::optional<torch::jit::ExecutorExecutionMode>;
Mode& reach(torch::jit::GraphFunction& function, Of<Mode> member);
template struct Reach<Mode, &torch::jit::GraphFunction::executor_execution_mode_>;

// Guards them all.
std::recursive_mutex& reach(torch::jit::GraphFunction& function, Of<std::recursive_mutex> member);
template struct Reach<std::recursive_mutex, &torch::jit::GraphFunction::compile_mutex>;

bool has_loop(const torch::jit::Node& node) {
  if (node.kind() == c10::prim::Loop) return true;
  return std::ranges::any_of(node.blocks(), [](const torch::jit::Block* block) {
    return std::ranges::any_of(block->nodes(), [](const torch::jit::Node* inner) { return has_loop(*inner); });
  });
}

// Makes the only result of a loop, or of an `if` with a loop in it, one that is used twice, in a tuple that is unpacked
// at once. LibTorch's interpreter computes a result that is used once in the middle of the operator that uses it: in
// `x + result` after x. If the loop uses x too, that is the last use which it sees, and it gives x away in the first
// round (LibTorch 2.11; LibTorch's optimizer, which is off, would change such loops).
void keep_loops_apart(torch::jit::Block& block) {
  for (torch::jit::Node* const node : block.nodes()) {
    for (torch::jit::Block* const inner : node->blocks()) keep_loops_apart(*inner);
    if (node->outputs().size() != 1 || !has_loop(*node)) continue;
    torch::jit::Graph& graph = *node->owningGraph();
    torch::jit::Value* const result = node->output();
    torch::jit::Node* const twice = graph.createTuple({result, result})->insertAfter(node);
    torch::jit::Node* const unpacked = graph.createTupleUnpack(twice->output())->insertAfter(twice);
    result->replaceAllUsesAfterNodeWith(unpacked, unpacked->output(0));
  }
}

// Drops the compiled code of a function, unless this was done before, and gives it graphs that run as they are written.
// A thread may be inside of the code, so it stays alive. With `has_autocast` it is done each time, and the graph for
// autocast that is off is left to LibTorch's passes.
void forget_compiled(torch::jit::GraphFunction& function, bool has_autocast) {
  static auto* const dropped = new std::vector<torch::jit::GraphExecutor>();
  static std::mutex of_dropped;
  const std::lock_guard compiling(reach(function, Of<std::recursive_mutex>()));
  if (reach(function, Of<Mode>()) == torch::jit::SIMPLE && !has_autocast) return;
  for (auto& executor : reach(function, Of<Executors>())) {
    if (!executor) continue;
    const std::lock_guard lock(of_dropped);
    dropped->push_back(*executor);
    executor.reset();
  }
  Graphs& graphs = reach(function, Of<Graphs>());
  graphs.front() = nullptr;
  for (std::size_t i = has_autocast ? 1 : 0; i < graphs.size(); ++i) {
    graphs[i] = function.graph()->copy();
    keep_loops_apart(*graphs[i]->block());
  }
  function._set_initial_executor_execution_mode(torch::jit::SIMPLE);
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace

ScriptCode read_code(const Module& root) {
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
  CodeReader reader(bare);
  for (auto module = modules.rbegin(); module != modules.rend(); ++module) reader.read(module->first, module->second);
  return reader.take();
}

void run_as_written(const ScriptCode& code) {
  for (torch::jit::GraphFunction* const each : code.functions) forget_compiled(*each, code.has_autocast);
  if (!code.has_autocast) return;
  detail::AutocastSettings off = detail::autocast_settings();
  off.cpu.is_on = off.cuda.is_on = false;
  const detail::WithAutocast without(off);
  const torch::jit::GraphOptimizerEnabledGuard optimized(true);
  for (torch::jit::GraphFunction* const each : code.functions) {
    const std::lock_guard compiling(reach(*each, Of<std::recursive_mutex>()));
    try {
      keep_loops_apart(*each->optimized_graph()->block());
    } catch (const std::exception& error) {
      each->clear_optimized_graphs();  // else the half-made one would be taken the next time
      throw std::invalid_argument(fmt::format(
          "parallelize_module: LibTorch cannot compile the blocks of autocast in {}, so that they would have no "
          "effect: {}. Give torch.autocast constants, such as attributes that are Final, or script the module without "
          "the function",
          each->qualname().qualifiedName(), first_line(error.what())));
    }
  }
}

}  // namespace tessera

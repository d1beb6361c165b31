#include "tessera/styles/style.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "tessera/styles/layout_plan.h"

namespace tessera {
namespace {

// Returns the tensor: "weight" is the module's, "out_proj.weight" its child's. nullptr where there is none.
const NamedTensor* find_tensor(const ModuleTree& tree, const ModuleNode& node, const std::string& name) {
  const std::size_t dot = name.find('.');
  if (dot == std::string::npos) {
    const auto found = std::find_if(node.tensors.begin(), node.tensors.end(),
                                    [&](const NamedTensor& item) { return item.name == name; });
    return found == node.tensors.end() ? nullptr : &*found;
  }
  for (const auto& [child, index] : node.children) {
    if (child == name.substr(0, dot)) return find_tensor(tree, tree.at(index), name.substr(dot + 1));
  }
  return nullptr;
}

}  // namespace

Style::Style(std::shared_ptr<const ParallelStyle> style) : style_(std::move(style)) {
  if (!style_) throw std::invalid_argument("Style: the style is null; give a ParallelStyle, such as ColwiseParallel()");
}

const DeviceMesh& ApplyContext::mesh() const { return plan_.mesh(); }

int64_t ApplyContext::tensor_dim() const {
  if (tensor_dim_) return *tensor_dim_;
  throw std::invalid_argument(fmt::format(
      "parallelize_module: {}: no mesh dimension is left for tensors, since data_dims [{}] are all that {} has; leave "
      "the style out of the plan, or give a mesh of one more dimension, such as {{dp: 2, tp: 2}}",
      by(), fmt::join(data_dims_, ", "), mesh().mesh().to_string()));
}

torch::nn::Module& ApplyContext::module() const {
  if (node_.module != nullptr) return *node_.module;
  throw std::invalid_argument(
      fmt::format("parallelize_module: {}: a {} of TorchScript is no torch::nn::Module; a style for both kinds of "
                  "modules must use only tensors(), place() and contract()",
                  by(), type()));
}

std::string ApplyContext::by() const { return fmt::format("{} ({})", shown_path(path()), style_); }

const NamedTensor* ApplyContext::find(const std::string& name) const { return find_tensor(tree_, node_, name); }

bool ApplyContext::has(const std::string& name) const { return find(name) != nullptr; }

const NamedTensor& ApplyContext::tensor(const std::string& name) const {
  if (const NamedTensor* const found = find(name)) return *found;
  std::string names;
  for (const NamedTensor& item : node_.tensors) names += (names.empty() ? "" : ", ") + item.name;
  throw std::invalid_argument(fmt::format("parallelize_module: {}: a {} has no parameter or buffer '{}'; it has {}",
                                          by(), type(), name, names.empty() ? "none" : names));
}

std::vector<int64_t> ApplyContext::dims_of_parts() const {
  std::vector<int64_t> parts;
  std::ranges::copy_if(data_dims_, std::back_inserter(parts), [&](int64_t dim) { return mesh().size(dim) > 1; });
  return parts;
}

void ApplyContext::place(const std::string& name, const Placement& placement) {
  if (!placement.is_replicate()) tensor_dim();  // throws where there is none
  plan_.place(tensor(name).tensor, placement, by());
}

void ApplyContext::contract(const std::string& name, const ContractLayouts& layouts) {
  const at::Tensor& t = tensor(name).tensor;
  for (const Placement* placement : {&layouts.input, &layouts.desired}) {
    if (placement->is_partial()) {
      throw std::invalid_argument(
          fmt::format("parallelize_module: {}: an input cannot have placement {}; give Replicate() or Shard(d)", by(),
                      to_string(*placement)));
    }
  }
  plan_.add_contract(t, {.path = joined_path(path(), name),
                         .style = style_,
                         .operators = layouts.operators,
                         .mesh_dim = tensor_dim(),
                         .data_dims = dims_of_parts(),
                         .input = layouts.input,
                         .desired = layouts.desired,
                         .output = layouts.output,
                         .use_local_output = layouts.use_local_output,
                         .gather_input_again = layouts.gather_input_again,
                         .next = nullptr});
}

int64_t ApplyContext::num_heads() const {
  if (node_.num_heads > 0) return node_.num_heads;
  throw std::invalid_argument(fmt::format(
      "parallelize_module: {}: the code of this traced {} does not say how many heads its {} features belong to, so "
      "whole heads cannot be assigned to ranks; script the module (torch.jit.script), or leave it out of the plan",
      by(), type(), embed_dim()));
}

Hookable& ApplyContext::hookable() const {
  auto* const hookable = dynamic_cast<Hookable*>(node_.module);
  if (hookable != nullptr) return *hookable;
  if (node_.module == nullptr) {
    throw std::invalid_argument(fmt::format(
        "parallelize_module: {}: the forward of a {} of TorchScript cannot be hooked; call the script module from a "
        "TESSERA_MODULE (tessera/styles/hooks.h) that has this style, or redistribute what enters and leaves it "
        "yourself",
        by(), type()));
  }
  throw std::invalid_argument(
      fmt::format("parallelize_module: {}: the forward of a {} cannot be hooked, because LibTorch's modules have no "
                  "hooks; declare the class with TESSERA_MODULE(Name) of tessera/styles/hooks.h in the place of "
                  "TORCH_MODULE(Name), or give this style to such a container around it",
                  by(), type()));
}

void ApplyContext::forward_pre_hook(Hookable::PreHook hook, bool throws_alike) {
  Hookable& target = hookable();
  plan_.at_end(
      [&target, hook = std::move(hook), throws_alike] { target.register_forward_pre_hook(hook, throws_alike); });
}

void ApplyContext::forward_hook(Hookable::Hook hook, bool throws_alike) {
  Hookable& target = hookable();
  plan_.at_end([&target, hook = std::move(hook), throws_alike] { target.register_forward_hook(hook, throws_alike); });
}

void ApplyContext::unknown_module(const std::string& knows) const {
  throw std::invalid_argument(
      fmt::format("parallelize_module: {} does not know the module {} of type {}; it knows {}. Leave the module out of "
                  "the plan, so that it is replicated, or derive a style of your own from ParallelStyle",
                  style_, path().empty() ? "at the root" : path(), type(), knows));
}

std::string to_string(const ParallelPlan& plan) {
  std::size_t width = 0;
  for (const auto& [pattern, style] : plan) width = std::max(width, pattern.size());
  std::string text;
  for (const auto& [pattern, style] : plan) {
    text += fmt::format("{:<{}}  {}\n", pattern.empty() ? "\"\"" : pattern, width, style->to_string());
  }
  return text;
}

}  // namespace tessera

#include "tessera/styles/clone.h"

#include <torch/library.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/styles/hookable.h"

namespace tessera {
namespace {

// LibTorch asks this before tensor.set_data(other), which Module::clone() and Module::to() call to give a module's new,
// plain parameters the values of others. A plain tensor may become a DTensor this way; a DTensor never becomes plain.
bool may_take_over(const at::Tensor&, const at::Tensor& from) { return detail::is_dtensor(from); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { m.impl("_has_compatible_shallow_copy_type", may_take_over); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { m.impl("_has_compatible_shallow_copy_type", may_take_over); }

void copy_hooks(const torch::nn::Module& from, torch::nn::Module& to) {
  const auto* const source = dynamic_cast<const Hookable*>(&from);
  auto* const target = dynamic_cast<Hookable*>(&to);
  if (source != nullptr && target != nullptr) *target = *source;
  const auto children = to.named_children();
  for (const auto& child : from.named_children()) {
    if (const auto* const same = children.find(child.key())) copy_hooks(*child.value(), **same);
  }
}

}  // namespace

std::shared_ptr<torch::nn::Module> clone_module(const torch::nn::Module& module) {
  auto copy = module.clone();
  copy_hooks(module, *copy);
  return copy;
}

}  // namespace tessera

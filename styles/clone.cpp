#include "tessera/styles/clone.h"

#include <memory>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/styles/hookable.h"

namespace tessera {
namespace {

// Gives `from` the contract of the parameter that is about to become a tensor like it, so that the parameter keeps it.
// Another parameter keeps its own, and a copy of this one takes on the schedule of gathers, which learns which memory
// the parameter has.
void keep_contract(const at::Tensor& parameter, const at::Tensor& from) {
  const detail::Meta& own = detail::meta(parameter);
  detail::Meta& other = detail::meta(from);
  if (own.contract == nullptr) return;
  const bool alike = other.spec->mesh == own.spec->mesh && other.spec->placements == own.spec->placements &&
                     other.spec->sizes == own.spec->sizes;
  const bool may_follow = alike && !c10::isIntegralType(other.spec->dtype, /*includeBool=*/true);
  if (may_follow && own.contract->gather_schedule) own.contract->gather_schedule->follow(own, other);
  if (other.contract != nullptr && !other.contract->derived) {
    if (alike && other.contract == own.contract->of_copies) other.contract = own.contract;
    return;
  }
  if (!alike) {
    throw std::invalid_argument(fmt::format(
        "set_data: the parameter {} of a {} is {}, and its new values are {}; redistribute them to the parameter's "
        "layout, or write them by copy_",
        own.contract->path, own.contract->style, to_string(*own.spec), to_string(*other.spec)));
  }
  other.contract = own.contract;
}

// LibTorch asks this before tensor.set_data(other), which Module::clone() and Module::to() call to give a module's new,
// plain parameters the values of others. A plain tensor may become a DTensor this way; a DTensor never becomes plain.
bool may_take_over(const at::Tensor& self, const at::Tensor& from) {
  if (!detail::is_dtensor(from)) return false;
  if (detail::is_dtensor(self)) keep_contract(self, from);
  return true;
}

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

#include "tessera/dtensor/gradient.h"

#include <typeinfo>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera::detail {
namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

// Redistributes the summed gradient of one tensor to its layout. This is explicit communication, which Strict allows.
class GradientHook final : public FunctionPreHook {
 public:
  GradientHook(std::size_t index, SpecPtr spec, std::string path, bool terms_alone = false)
      : index_(index), spec_(std::move(spec)), path_(std::move(path)), terms_alone_(terms_alone) {}

  variable_list operator()(const variable_list& grads) override {
    variable_list out = grads;
    at::Tensor& g = out[index_];
    if (!g.defined() || (spec_ == nullptr && !is_dtensor(g))) return out;
    if (spec_ != nullptr && !spec_->partial && is_dtensor(g) && meta(g).spec == spec_) return out;  // it is there
    // A plain gradient, such as one that the caller passes for a loss, counts as replicated.
    if (!is_dtensor(g)) g = wrap(g, replicated_spec(spec_->mesh, g));
    const Explicit guard;
    const World::Scope scope(meta(g).spec->mesh.world(), "gradient", path_.empty() ? nullptr : &path_);
    if (spec_ == nullptr) {
      g = full_tensor(g);
      return out;
    }
    g = redistribute(g, goal(placements_of(g)));
    return out;
  }

  std::size_t index() const { return index_; }
  // Counts one more use by a contract. Most hooks have no such use, and allocate no counter.
  std::shared_ptr<const int> use() {
    if (uses_ == nullptr) uses_ = std::make_shared<int>(0);
    ++*uses_;
    return uses_;
  }
  // Updates the layout: the tensor was a plain parameter and has been distributed in place since.
  void follow(const SpecPtr& spec) {
    if (spec_ != spec) spec_ = spec;
  }

 private:
  Placements goal(Placements gradient) const {
    const Placements own = without_partial(spec_->placements);
    if (!terms_alone_) return own;
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (gradient[i].is_partial()) gradient[i] = own[i];
    }
    return gradient;
  }

  std::size_t index_;
  SpecPtr spec_;  // nullptr for a plain tensor
  std::string path_;
  bool terms_alone_;  // only pending reductions are carried out
  std::shared_ptr<int> uses_;
};

using Hooks = std::vector<std::unique_ptr<FunctionPreHook>>;

GradientHook* as_gradient_hook(FunctionPreHook& hook) {
  return typeid(hook) == typeid(GradientHook) ? static_cast<GradientHook*>(&hook) : nullptr;
}

// Returns a hook of that index, or nullptr; every hook of that index takes `spec` as its layout.
GradientHook* find_hook(const Hooks& hooks, std::size_t index, const SpecPtr& spec) {
  GradientHook* found = nullptr;
  for (const auto& each : hooks) {
    GradientHook* const hook = as_gradient_hook(*each);
    if (hook == nullptr || hook->index() != index) continue;
    if (spec != nullptr) hook->follow(spec);
    found = hook;
  }
  return found;
}

// Adds a hook before and one after the caller's own hooks, so that these get a gradient in the leaf's layout, and what
// they return is in that layout again. The list of C++ hooks is created here: otherwise the first register_hook would
// create it and drop all hooks that exist.
void watch_leaf(const at::Tensor& t, torch::autograd::AutogradMeta& autograd) {
  static const SpecPtr none;
  const SpecPtr& spec = is_dtensor(t) ? meta(t).spec : none;
  if (find_hook(autograd.hooks_, 0, spec) != nullptr) return;
  const ContractPtr contract = spec != nullptr ? meta(t).contract : nullptr;
  const std::string path = contract ? contract->path : std::string();
  if (autograd.cpp_hooks_list_ == nullptr) {
    Hooks others = std::move(autograd.hooks_);
    torch::autograd::impl::create_cpp_hook(t);
    for (auto& hook : others) autograd.hooks_.push_back(std::move(hook));
  }
  autograd.hooks_.insert(autograd.hooks_.begin(), std::make_unique<GradientHook>(0, spec, path));
  autograd.hooks_.push_back(std::make_unique<GradientHook>(0, spec, path));
}

// Returns the node that made `t`. For a view whose base was written since, LibTorch makes it anew by repeating the
// view: that must be seen by autograd, below which this is called.
std::shared_ptr<torch::autograd::Node> node_of(const at::Tensor& t) {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard above(keys.included_,
                                               keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  return t.grad_fn();
}

}  // namespace

void watch_gradient(const at::Tensor& t) {
  c10::AutogradMetaInterface* const interface = t.unsafeGetTensorImpl()->autograd_meta();
  if (interface == nullptr || !interface->requires_grad()) return;
  auto* const autograd = static_cast<torch::autograd::AutogradMeta*>(interface);
  if (autograd->grad_fn_ == nullptr && (!autograd->is_view_ || node_of(t) == nullptr)) {
    watch_leaf(t, *autograd);
    return;
  }
  if (is_dtensor(t)) return;
  const auto node = node_of(t);
  if (node == nullptr || find_hook(node->tensor_pre_hooks(), t.output_nr(), nullptr) != nullptr) return;
  node->add_tensor_pre_hook(std::make_unique<GradientHook>(t.output_nr(), nullptr, std::string()));
}

std::shared_ptr<const int> add_reduction_hook(const at::Tensor& t) {
  const auto& node = t.grad_fn();
  if (node == nullptr) return nullptr;
  if (GradientHook* const there = find_hook(node->tensor_pre_hooks(), t.output_nr(), nullptr)) return there->use();
  auto hook = std::make_unique<GradientHook>(t.output_nr(), meta(t).spec, std::string(), /*terms_alone=*/true);
  const std::shared_ptr<const int> uses = hook->use();
  node->add_tensor_pre_hook(std::move(hook));
  return uses;
}

void add_layout_hook(const at::Tensor& t, const std::string& path) {
  const auto& node = t.grad_fn();
  if (node == nullptr) return;
  node->add_tensor_pre_hook(std::make_unique<GradientHook>(t.output_nr(), meta(t).spec, path));
}

}  // namespace tessera::detail

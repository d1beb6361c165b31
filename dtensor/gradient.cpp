#include "tessera/dtensor/gradient.h"

#include <typeinfo>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/modes.h"
#include "tessera/dtensor/tensor.h"

namespace tessera::detail {
namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

// Brings the summed gradient of one tensor where it belongs. The reduction of a gradient into its parameter is explicit.
class GradientHook final : public FunctionPreHook {
 public:
  GradientHook(std::size_t index, SpecPtr spec, std::string path)
      : index_(index), spec_(std::move(spec)), path_(std::move(path)) {}

  variable_list operator()(const variable_list& grads) override {
    variable_list out = grads;
    at::Tensor& g = out[index_];
    if (!g.defined() || (spec_ == nullptr && !is_dtensor(g))) return out;
    // A plain one, such as the caller's own for a loss, counts as replicated.
    if (!is_dtensor(g)) g = wrap(g, replicated_spec(spec_->mesh, g));
    const Explicit guard;
    const World::Scope scope(meta(g).spec->mesh.world(), "gradient", path_.empty() ? nullptr : &path_);
    if (spec_ == nullptr) {
      g = full_tensor(g);
      return out;
    }
    g = redistribute(g, without_partial(spec_->placements));
    return out;
  }

  std::size_t index() const { return index_; }
  // The tensor has become another since: a plain parameter that was distributed in place.
  void follow(const SpecPtr& spec) { spec_ = spec; }

 private:
  std::size_t index_;
  SpecPtr spec_;  // nullptr: of a plain tensor
  std::string path_;
};

GradientHook* find_hook(const std::vector<std::unique_ptr<FunctionPreHook>>& hooks, std::size_t index) {
  for (const auto& hook : hooks) {
    FunctionPreHook& h = *hook;
    if (typeid(h) == typeid(GradientHook) && static_cast<GradientHook&>(h).index() == index) {
      return static_cast<GradientHook*>(&h);
    }
  }
  return nullptr;
}

}  // namespace

void watch_gradient(const at::Tensor& t) {
  c10::AutogradMetaInterface* const interface = t.unsafeGetTensorImpl()->autograd_meta();
  if (interface == nullptr || !interface->requires_grad()) return;
  auto* const autograd = static_cast<torch::autograd::AutogradMeta*>(interface);
  const bool dtensor = is_dtensor(t);
  if (autograd->grad_fn_ == nullptr && (!autograd->is_view_ || t.grad_fn() == nullptr)) {
    if (GradientHook* const hook = find_hook(autograd->hooks_, 0)) {
      if (dtensor) hook->follow(meta(t).spec);
      return;
    }
    const ContractPtr contract = dtensor ? meta(t).contract : nullptr;
    autograd->hooks_.push_back(
        std::make_unique<GradientHook>(0, dtensor ? meta(t).spec : nullptr, contract ? contract->path : std::string()));
    return;
  }
  if (dtensor) return;
  const auto& node = t.grad_fn();
  if (node == nullptr || find_hook(node->tensor_pre_hooks(), t.output_nr()) != nullptr) return;
  node->add_tensor_pre_hook(std::make_unique<GradientHook>(t.output_nr(), nullptr, std::string()));
}

}  // namespace tessera::detail

#include "tessera/dtensor/gradient.h"

#include <algorithm>
#include <typeinfo>
#include <utility>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/saved.h"
#include "tessera/placement/layout.h"

namespace tessera::detail {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

// Says whether a leaf has hooks of the user's own.
bool has_others(const AutogradMeta& leaf);

// Redistributes the summed gradient of one tensor to its layout. This is explicit communication, which Strict allows.
class GradientHook final : public FunctionPreHook {
 public:
  enum class Does {
    kTermsAlone,  // only pending reductions are carried out
    kCutsAlone,   // only what is not pending is redistributed
    kAll,
    kAllOfLeaf,  // and the gradient, which autograd may keep as .grad, gets memory of its own
  };
  GradientHook(std::size_t index, SpecPtr spec, std::string path, Does does = Does::kAll)
      : index_(index), spec_(std::move(spec)), path_(std::move(path)), does_(does) {}

  variable_list operator()(const variable_list& grads) override {
    variable_list out = grads;
    at::Tensor& g = out[index_];
    if (g.defined()) bring(g);
    return out;
  }

  // See set_reducer(). `leaf` owns this hook; the first of its hooks gives the gradient to the reducer.
  void set_reducer(AutogradMeta& leaf, std::shared_ptr<GradientReducer> reducer, std::size_t leaf_index,
                   bool is_first) {
    leaf_ = &leaf;
    reducer_ = std::move(reducer);
    leaf_index_ = leaf_index;
    is_first_ = is_first;
  }

  std::size_t index() const { return index_; }
  // Counts one more use by a contract. Most hooks have no such use, and allocate no counter.
  std::shared_ptr<const int> use() {
    if (uses_ == nullptr) uses_ = std::make_shared<int>(0);
    ++*uses_;
    return uses_;
  }
  // Makes the hook do `part` too.
  void add_part(Does part) {
    if (does_ != part && does_ != Does::kAllOfLeaf) does_ = Does::kAll;
  }
  // Updates the layout: the tensor was a plain parameter and has been distributed in place since.
  void follow(const SpecPtr& spec) {
    if (spec_ != spec) spec_ = spec;
  }

 private:
  void bring(at::Tensor& g) {
    if (spec_ == nullptr) {
      if (is_dtensor(g)) g = whole(g);
      return;
    }
    // A plain gradient, such as one that the caller passes for a loss, counts as replicated.
    if (reducer_ != nullptr && is_added_to_grad()) {
      if (!is_first_) return;  // the first hook has done it, and there is no other between them
      g = as_dtensor(g, *spec_);
      const GradientReducer::Outcome outcome = reducer_->take(leaf_index_, g);
      if (outcome == GradientReducer::Outcome::kTaken) g = at::Tensor();
      if (outcome == GradientReducer::Outcome::kKeep) g = own(g);
      if (outcome != GradientReducer::Outcome::kReduceNow) return;
    }
    if (!is_there(g)) g = redistributed(as_dtensor(g, *spec_));
    if (does_ == Does::kAllOfLeaf) g = own(g);
  }

  at::Tensor whole(const at::Tensor& g) const {
    constexpr std::size_t kOwnHandles = 2;  // those in the list that autograd gave and in the one that is returned
    const bool is_held = !c10::GradMode::is_enabled() && (g.use_count() > kOwnHandles || shares_memory(g));
    const Explicit guard;
    const World::Scope scope(meta(g).spec->mesh.world(), "gradient", path_.empty() ? nullptr : &path_);
    return whole_gradient(g, is_held);
  }

  at::Tensor redistributed(const at::Tensor& g) const {
    const Explicit guard;
    const World::Scope scope(meta(g).spec->mesh.world(), "gradient", path_.empty() ? nullptr : &path_);
    return redistribute(g, goal(placements_of(g)));
  }

  // Returns a copy where somebody else holds the gradient's memory by another tensor. Of a tensor that others hold as
  // it is, and under create_graph, autograd makes the copy itself. A view, such as that of a Linear's transposed
  // weight, always shares memory with its base: it is taken as autograd takes it, without a copy.
  static at::Tensor own(const at::Tensor& g) {
    return !c10::GradMode::is_enabled() && !g.is_view() && shares_memory(g) ? g.clone() : g;
  }

  // Says whether the gradient is in its layout already.
  bool is_there(const at::Tensor& g) const {
    if (spec_->partial || !is_dtensor(g)) return false;
    return reducer_ != nullptr ? meta(g).spec->placements == reducer_->layout(leaf_index_) : meta(g).spec == spec_;
  }

  // Returns the layout that the gradient gets: that of the tensor, where a partition of its own does not go with those
  // of the gradient that stay.
  Placements goal(Placements gradient) const {
    Placements own = reducer_ != nullptr ? reducer_->layout(leaf_index_) : without_partial(spec_->placements);
    if (does_ == Does::kAll || does_ == Does::kAllOfLeaf) return own;
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (gradient[i].is_partial() == (does_ == Does::kTermsAlone)) gradient[i] = own[i];
    }
    return is_layout(gradient, spec_->mesh.mesh(), spec_->sizes) ? gradient : own;
  }

  // Says whether autograd will add the gradient to the leaf's .grad, with nothing but this library's hooks before that.
  bool is_added_to_grad() const {
    if (c10::GradMode::is_enabled() || has_others(*leaf_)) return false;
    const auto* const tasks = torch::autograd::get_current_graph_task_exec_info();
    if (tasks == nullptr || tasks->empty()) return true;
    const auto found = tasks->find(leaf_->grad_accumulator_.lock().get());
    return found != tasks->end() && found->second.captures_ == nullptr;
  }
  std::size_t index_;
  SpecPtr spec_;  // nullptr for a plain tensor
  std::string path_;
  Does does_;
  std::shared_ptr<int> uses_;

  std::shared_ptr<GradientReducer> reducer_;  // nullptr: each gradient is reduced by itself
  std::size_t leaf_index_ = 0;
  AutogradMeta* leaf_ = nullptr;
  bool is_first_ = false;
};

using Hooks = std::vector<std::unique_ptr<FunctionPreHook>>;

GradientHook* as_gradient_hook(FunctionPreHook& hook) {
  return typeid(hook) == typeid(GradientHook) ? static_cast<GradientHook*>(&hook) : nullptr;
}

// The list of C++ hooks is itself a hook, which watch_leaf makes, and which is there without an entry too.
bool has_others(const AutogradMeta& leaf) {
  const auto is_own = [](const auto& hook) { return as_gradient_hook(*hook) != nullptr; };
  const auto is_there = [](const auto& hook) { return static_cast<bool>(hook); };
  const auto own = std::ranges::count_if(leaf.hooks_, is_own);
  return leaf.post_acc_grad_hooks_ != nullptr || std::cmp_greater(leaf.hooks_.size(), own + 1) ||
         (leaf.cpp_hooks_list_ != nullptr && std::ranges::any_of(*leaf.cpp_hooks_list_, is_there));
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
void watch_leaf(const at::Tensor& t, AutogradMeta& autograd) {
  static const SpecPtr none;
  const SpecPtr& spec = is_dtensor(t) ? meta(t).spec : none;
  if (find_hook(autograd.hooks_, 0, spec) != nullptr) return;
  const ContractPtr contract = spec != nullptr ? meta(t).contract : nullptr;
  const std::string path = contract ? contract->path : std::string();
  if (autograd.cpp_hooks_list_ == nullptr) {
    Hooks others = std::exchange(autograd.hooks_, {});
    torch::autograd::impl::create_cpp_hook(t);
    for (auto& hook : others) autograd.hooks_.push_back(std::move(hook));
  }
  const auto hook = [&] { return std::make_unique<GradientHook>(0, spec, path, GradientHook::Does::kAllOfLeaf); };
  autograd.hooks_.insert(autograd.hooks_.begin(), hook());
  autograd.hooks_.push_back(hook());
}

// Returns the node that made `t`. For a view whose base was written since, LibTorch makes it anew by repeating the
// view: that must be seen by autograd, below which this is called.
std::shared_ptr<torch::autograd::Node> node_of(const at::Tensor& t) {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard above(keys.included_,
                                               keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  return t.grad_fn();
}

// Brings the gradient of a tensor of which a view was written into the tensor's layout, in which the view could be
// made: LibTorch makes that view of the gradient too, and writes it. What is pending can be viewed as it is.
void watch_written(const at::Tensor& t, const AutogradMeta& autograd) {
  torch::autograd::Node* const made = autograd.grad_fn_.get();
  if (made == nullptr || typeid(*made) != typeid(torch::autograd::CopySlices)) return;
  if (GradientHook* const there = find_hook(made->tensor_pre_hooks(), t.output_nr(), nullptr))
    return there->add_part(GradientHook::Does::kCutsAlone);
  made->add_tensor_pre_hook(
      std::make_unique<GradientHook>(t.output_nr(), meta(t).spec, std::string(), GradientHook::Does::kCutsAlone));
}

thread_local NestedBackward* innermost = nullptr;

}  // namespace

void watch_gradient(const at::Tensor& t) {
  c10::AutogradMetaInterface* const interface = t.unsafeGetTensorImpl()->autograd_meta();
  if (interface == nullptr || !interface->requires_grad()) return;
  auto* const autograd = static_cast<AutogradMeta*>(interface);
  if (autograd->grad_fn_ == nullptr && (!autograd->is_view_ || node_of(t) == nullptr)) {
    watch_leaf(t, *autograd);
    return;
  }
  if (is_dtensor(t)) return watch_written(t, *autograd);
  const auto node = node_of(t);
  if (node == nullptr || find_hook(node->tensor_pre_hooks(), t.output_nr(), nullptr) != nullptr) return;
  node->add_tensor_pre_hook(std::make_unique<GradientHook>(t.output_nr(), nullptr, std::string()));
}

bool has_hooks_of_others(const at::Tensor& leaf) {
  const auto* const autograd = static_cast<const AutogradMeta*>(leaf.unsafeGetTensorImpl()->autograd_meta());
  return autograd != nullptr && has_others(*autograd);
}

at::Tensor whole_gradient(const at::Tensor& gradient, bool is_held) {
  const at::Tensor& piece = meta(gradient).local();
  if (!mesh_of(gradient).is_member()) return at::zeros(gradient.sizes(), piece.options());
  const at::Tensor whole = full_tensor(gradient);
  return is_held && whole.is_alias_of(piece) ? whole.clone() : whole;
}

std::shared_ptr<const int> add_reduction_hook(const at::Tensor& t) {
  const auto& node = t.grad_fn();
  if (node == nullptr) return nullptr;
  if (GradientHook* const there = find_hook(node->tensor_pre_hooks(), t.output_nr(), nullptr)) {
    there->add_part(GradientHook::Does::kTermsAlone);
    return there->use();
  }
  auto hook =
      std::make_unique<GradientHook>(t.output_nr(), meta(t).spec, std::string(), GradientHook::Does::kTermsAlone);
  std::shared_ptr<const int> uses = hook->use();
  node->add_tensor_pre_hook(std::move(hook));
  return uses;
}

void add_layout_hook(const at::Tensor& t, const std::string& path) {
  const auto& node = t.grad_fn();
  if (node == nullptr) return;
  node->add_tensor_pre_hook(std::make_unique<GradientHook>(t.output_nr(), meta(t).spec, path));
}

void set_reducer(const at::Tensor& leaf, const std::shared_ptr<GradientReducer>& reducer, std::size_t index) {
  watch_gradient(leaf);
  auto& autograd = *static_cast<AutogradMeta*>(leaf.unsafeGetTensorImpl()->autograd_meta());
  bool is_first = true;
  for (const auto& each : autograd.hooks_) {
    GradientHook* const hook = as_gradient_hook(*each);
    if (hook == nullptr) continue;
    hook->set_reducer(autograd, reducer, index, is_first);
    is_first = false;
  }
}

NestedBackward::NestedBackward() : outer_(innermost) { innermost = this; }

NestedBackward::~NestedBackward() { innermost = outer_; }

void NestedBackward::finish() {
  innermost = outer_;
  for (std::function<void()>& each : callbacks_) at_end_of_backward(std::move(each));
  callbacks_.clear();
}

void at_end_of_backward(std::function<void()> callback) {
  if (innermost != nullptr) {
    innermost->callbacks_.push_back(std::move(callback));
  } else {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
  }
}

}  // namespace tessera::detail

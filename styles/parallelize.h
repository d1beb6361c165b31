#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/calling.h"
#include "tessera/styles/parallel_styles.h"
#include "tessera/styles/prepare_styles.h"
#include "tessera/styles/style.h"

namespace torch::nn {
class AnyModule;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace tessera {

struct ParallelizeOptions {
  // Is the mesh dimension that styles shard over, by name or index; a negative index counts from the end. nullopt means
  // the one called "tp", or the mesh's only dimension. But there is none, and no style may cut anything, where
  // data_dims list all mesh dimensions, or where the plan has no entry and the only dimension has a name, such as {dp:
  // 4}: it splits the batch.
  std::optional<MeshDim> tensor_dim = {};
  // Lists the mesh dimensions that split the batch: {{"dp"}} or {{0, 1}}. nullopt means all but the one that styles
  // shard over. Parameters are replicated there, and inputs are DTensors with Shard(0) on them: from_local(piece, mesh,
  // placements).
  std::optional<MeshDims> data_dims = {};
  // With Shard(0), parameters (not buffers) are sharded on the data dimensions too, along dimension 0, after the tensor
  // dimension's shard, and an optimizer holds state for the piece alone. Operators that use a parameter gather it over
  // the data dimensions, and its gradient is reduce-scattered. This communication is explicit: Strict allows it. Styles
  // with use_local_output are refused. nullopt means that parameters are replicated there.
  std::optional<Placement> data_placement = {};
  // Says how much data_placement saves, as ZeRO's stages do (Rajbhandari et al., arXiv 1910.02054):
  //   3  a gathered parameter is freed after the operator; it is gathered again for the next one, and in backward;
  //   2  a parameter is gathered when it is first used after it was written, and kept until it is written again;
  //   1  the same, and gradients are reduced whole: only the optimizer's state is sharded.
  int64_t zero_stage = 3;
  // Lists the data dimensions that data_placement shards over; on the others there are replicas of the shards. nullopt
  // means all data dimensions.
  std::optional<MeshDims> shard_dims = {};
  // Is the most that is gathered ahead of its use, in bytes of whole parameters on one rank; a single parameter may be
  // larger. From the second step on, the parameters that are used next are gathered by one collective while an operator
  // computes. 0: none is.
  int64_t gather_ahead_bytes = GatherScheduleOptions().ahead_bytes;
  // Says that a call with plain tensors alone is right where several ranks split the batch: forward makes DTensors of
  // them, they are no part of a batch, or the batch is where the call does not look for DTensors. A call of a module
  // that has pre-hooks, which may make DTensors too, is never refused.
  bool allow_plain = false;
  // Is the dtype, bfloat16 or float16, in which the operators that LibTorch's autocast lists compute when the module is
  // called through what parallelize_module returns. Parameters keep their dtype, and so do their gradients, which
  // gradient_buckets.dtype may send in another. nullopt: operators compute in the dtypes of their inputs.
  std::optional<at::ScalarType> compute_dtype = {};
  // Says how gradients are reduced together; see dtensor/gradient_buckets.h.
  GradientBucketOptions gradient_buckets = {};
  // Is the global rank whose values count; by default it is the mesh's first. With kNoSource each rank keeps its part
  // of its own values, without communication: the values must be equal on every rank, or the replicas differ silently.
  int64_t src_rank = kMeshFirstRank;
  // Says whether a pattern may match nothing.
  bool allow_unmatched = false;
  // Lists the optimizers that already hold the module's parameters. One with state is refused: LibTorch keys the state
  // by the parameter, and the state has the layout that the parameter had. Parallelize first and then make the
  // optimizer, or parallelize before the first step.
  std::vector<torch::optim::Optimizer*> optimizers = {};
};

namespace detail {

// Returns the module in a holder, a shared_ptr or an AnyModule; nullptr where there is none.
template <class Handle>
torch::nn::Module* module_in(const Handle& handle) {
  if constexpr (requires { handle.ptr(); }) {
    return handle.is_empty() ? nullptr : handle.ptr().get();
  } else {
    return handle.get();
  }
}

}  // namespace detail

// Holds a module whose forward is called under ImplicitReplication: a plain mask, arange or constant counts as
// replicated, except in an operator with a parameter whose style takes plain tensors for this rank's pieces. Where
// several ranks split the batch, a call with plain tensors and no DTensor throws std::invalid_argument, since nobody
// can know which part of the batch they are: see ParallelizeOptions::allow_plain. Under InferenceMode, on whose results
// nothing can be trained, they are each rank's own. The check looks into optionals, vectors, tuples and pairs, and at
// tensors behind pointers. A call with an argument of another type that may hold DTensors, such as a struct of the
// caller's own, passes.
//   auto tp = parallelize_module(model, mesh, plan);   tp(ids, mask);   tp->eval();
// A function of the module that is called through `->` runs without all this: use call().
// It holds the handle that it was made from: a holder, a shared_ptr or an AnyModule keeps the module alive; a reference
// must outlive it.
template <class Handle>
class Parallelized {
 public:
  explicit Parallelized(Handle handle, detail::Calling calling = {})
      : handle_(std::move(handle)), calling_(std::move(calling)) {}

  // Calls the module's forward.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    if (!makes_dtensors()) check_batch(args...);
    const ImplicitReplication guard;
    const detail::ComputeIn autocast(calling_.compute);
    if constexpr (requires(Handle h) { h.any_forward(std::forward<Args>(args)...); }) {
      return handle_.forward(std::forward<Args>(args)...);
    } else if constexpr (requires(Handle h) { h->forward(std::forward<Args>(args)...); }) {
      if constexpr (!std::derived_from<std::remove_reference_t<decltype(*handle_)>, Hookable>) check_no_hooks();
      return handle_->forward(std::forward<Args>(args)...);
    } else {
      // This is a TESSERA_MODULE that is called without some of its default arguments.
      return handle_(std::forward<Args>(args)...);
    }
  }

  // Calls another function of the module in the same way: std::invoke(function, module, args...), where `function` is a
  // member of the module's class (VaeImpl), or takes a reference to it. The root's own hooks do not run.
  //   const at::Tensor code = tp.call(&VaeImpl::encode, images);
  //   const at::Tensor loss = tp.call([](VaeImpl& vae, const at::Tensor& x) { return vae.loss(x, 0.5); }, images);
  template <class Function, class... Args>
  decltype(auto) call(Function&& function, Args&&... args) {
    check_batch(args...);
    const ImplicitReplication guard;
    const detail::ComputeIn autocast(calling_.compute);
    return std::invoke(std::forward<Function>(function), *operator->(), std::forward<Args>(args)...);
  }

  auto* operator->() {
    if constexpr (std::is_pointer_v<Handle>)
      return handle_;
    else if constexpr (requires(Handle h) { h.type_info(); })
      return handle_.ptr().get();
    else
      return handle_.operator->();
  }
  Handle& handle() { return handle_; }

 private:
  template <class... Args>
  void check_batch(const Args&... args) const {
    if (calling_.split_mesh.empty() || c10::InferenceMode::is_enabled()) return;
    detail::BatchCheck batch;
    (batch.see(args), ...);
    batch.check(calling_.split_mesh);
  }
  // Returns nullptr where the root's class has none.
  const Hookable* hookable() const {
    if constexpr (std::is_pointer_v<Handle>) {
      return dynamic_cast<const Hookable*>(static_cast<const torch::nn::Module*>(handle_));
    } else {
      return dynamic_cast<const Hookable*>(detail::module_in(handle_));
    }
  }
  // Says whether hooks of the root see its inputs first, and may make DTensors of them.
  bool makes_dtensors() const { return hookable() != nullptr && hookable()->has_pre_hooks(); }
  // For a handle of the class whose forward the hooked one overlays: that forward runs none of them.
  void check_no_hooks() const {
    if (hookable() != nullptr && hookable()->hooks() > 0) detail::refuse_without_hooks();
  }

  Handle handle_;
  detail::Calling calling_;
};

namespace detail {

// Makes the plan for a module.
using MakePlan = std::function<ParallelPlan(torch::nn::Module& root)>;
// Says what is parallelized, and how. Where one of the functions throws, perhaps on one rank alone, every rank throws
// that.
struct Subject {
  std::function<ModuleTree()> tree;
  std::function<ParallelPlan()> plan;
};
// Both return how the module is to be called. A `root` that is nullptr is refused.
Calling parallelize(const Subject& subject, const DeviceMesh& mesh, const ParallelizeOptions& options);
Calling parallelize(torch::nn::Module* root, const MakePlan& plan, const DeviceMesh& mesh,
                    const ParallelizeOptions& options);

// Is parallelize_module with a plan that depends on the module.
template <class Module>
auto parallelize_by(const MakePlan& plan, Module&& module, const DeviceMesh& mesh, const ParallelizeOptions& options) {
  using Given = std::remove_cvref_t<Module>;
  if constexpr (std::derived_from<Given, torch::nn::Module>) {
    return Parallelized<Given*>(&module, parallelize(&module, plan, mesh, options));
  } else {
    Given handle = std::forward<Module>(module);
    Calling calling = parallelize(module_in(handle), plan, mesh, options);
    return Parallelized<Given>(std::move(handle), std::move(calling));
  }
}

// Returns a function that makes this plan for any module; `plan` must outlive it.
inline MakePlan given_plan(const ParallelPlan& plan) {
  return [&plan](torch::nn::Module&) { return plan; };
}

}  // namespace detail

// Lays out the parameters and buffers of an unmodified module over the mesh, in place: every handle to one of them (the
// module's member, an optimizer's parameter, a tied weight) is a DTensor afterwards, with the same requires_grad, dtype
// and sharing; .grad is converted too. A module that no pattern names is replicated. The styles say how activations are
// laid out in the operators that use the parameters; between styled modules activations stay DTensors.
//
// `plan` gives styles to modules by name; see `match` in module_tree.h. One style instead of a plan is applied to the
// root.
//   auto tp = parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
//
// Communication: one all_reduce of 40 bytes per mesh dimension, by which the ranks agree that none has failed and that
// their modules and plans are the same; then for each parameter and buffer what distribute_tensor needs: at most one
// scatter and one broadcast. With kNoSource there is none.
// Throws before anything is converted, on every rank of the mesh, what the planning of the lowest rank that failed
// threw, and std::invalid_argument for:
//   - modules, plans, or layouts that styles ask for, that differ between ranks (not checked with kNoSource);
//   - a pattern that matches nothing;
//   - a module with two styles of which none is a Prepare style;
//   - a style that does not know its module;
//   - styles that disagree on a tied parameter;
//   - parameters or buffers that overlap in memory without being the same, or that are sparse, quantized, on the meta
//     device (except those of ShardedInit) or the result of an operator, or have a sparse gradient;
//   - a style for a parameter that is a DTensor already;
//   - a parameter with requires_grad that is a DTensor on another mesh, which lacks ranks along a data dimension;
//   - an Embedding or EmbeddingBag with sparse(true) whose weight requires a gradient;
//   - a style that cuts something where all mesh dimensions split the batch;
//   - a mesh of several dimensions of which none is called "tp", without tensor_dim and with data_dims that do not list
//     all of them;
//   - tensor_dim, data_dims or shard_dims that are not on the mesh, data_dims that name a mesh dimension twice or the
//     tensor dimension, and shard_dims that name one twice or one that is no data dimension;
//   - a data_placement other than Shard(0) or Replicate(), or Shard(0) without a data dimension or beside a style with
//     use_local_output; shard_dims, or a zero_stage other than 3, without Shard(0);
//   - a src_rank outside the mesh, a zero_stage other than 1, 2 or 3, a compute_dtype other than bfloat16 or float16, a
//     negative number of bytes, gradient_buckets with a dtype that is not floating or a cost model that does not fit;
//   - an optimizer with state;
//   - a null module.
// With kNoSource, which every rank must then give, each rank throws on its own, and an exception other than
// std::invalid_argument fails the job. On a rank outside the mesh the parameters become DTensors without a piece; such
// a rank does not learn of the other ranks' errors.
template <std::derived_from<torch::nn::Module> M>
Parallelized<M*> parallelize_module(M& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                                    const ParallelizeOptions& options = {}) {
  return detail::parallelize_by(detail::given_plan(plan), module, mesh, options);
}

// Does the same for a holder (torch::nn::Linear, your TORCH_MODULE), a shared_ptr to a module, or a
// torch::nn::AnyModule.
template <class Handle>
requires(!std::derived_from<Handle, torch::nn::Module> && requires(Handle h) { h.ptr(); })
    Parallelized<Handle> parallelize_module(Handle handle, const DeviceMesh& mesh, const ParallelPlan& plan,
                                            const ParallelizeOptions& options = {}) {
  return detail::parallelize_by(detail::given_plan(plan), std::move(handle), mesh, options);
}
template <std::derived_from<torch::nn::Module> M>
Parallelized<std::shared_ptr<M>> parallelize_module(std::shared_ptr<M> module, const DeviceMesh& mesh,
                                                    const ParallelPlan& plan, const ParallelizeOptions& options = {}) {
  return detail::parallelize_by(detail::given_plan(plan), std::move(module), mesh, options);
}
template <class Module>
auto parallelize_module(Module&& module, const DeviceMesh& mesh, const Style& style,
                        const ParallelizeOptions& options = {}) {
  return parallelize_module(std::forward<Module>(module), mesh, ParallelPlan{{"", style}}, options);
}

}  // namespace tessera

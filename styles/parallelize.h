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
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
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
  // The mesh dimension that styles shard over; negative counts from the end. None: the only one, or the one called
  // "tp".
  std::optional<int64_t> tensor_dim;
  // The mesh dimensions that split the batch. None: all others. Parameters are replicated there, and inputs are
  // DTensors: from_local(piece, mesh, placements) with Shard(0) on them.
  std::optional<std::vector<int64_t>> data_dims;
  // Shard(0): ZeRO-3. On the data dimensions, too, parameters (not buffers) are cut, along dimension 0 and behind the
  // tensor dimension's cut. A parameter is gathered over them for each operator that uses it, in forward and again in
  // backward, and freed after it; its gradient is reduce-scattered, and an optimizer holds state for the piece alone.
  // Explicit communication: Strict allows it. Not with use_local_output. None: replicated there.
  std::optional<Placement> data_placement;
  // The global rank whose values count; default the mesh's first. With kNoSource each rank keeps its part of its own
  // values, without communication: they must be equal on every rank, or the replicas differ silently.
  int64_t src_rank = kMeshFirstRank;
  // Whether a pattern may match nothing.
  bool allow_unmatched = false;
  // The optimizers that hold the module's parameters already. One with state is refused: LibTorch keys its state by the
  // parameter and lays it out as the parameter was. Parallelize, then make the optimizer, or call it before the first
  // step.
  std::vector<torch::optim::Optimizer*> optimizers;
};

// A module with its forward called under ImplicitReplication: a plain mask, arange or constant counts as replicated,
// but for one that meets a parameter whose style takes plain tensors for pieces.
//   auto tp = parallelize_module(model, mesh, plan);   tp(ids, mask);   tp->eval();
// Holds the handle it was made of: a holder, a shared_ptr or an AnyModule is kept alive; a reference must outlive it.
template <class Handle>
class Parallelized {
 public:
  explicit Parallelized(Handle handle) : handle_(std::move(handle)) {}

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    const ImplicitReplication guard;
    if constexpr (requires(Handle h) { h.any_forward(std::forward<Args>(args)...); }) {
      return handle_.forward(std::forward<Args>(args)...);
    } else if constexpr (requires(Handle h) { h->forward(std::forward<Args>(args)...); }) {
      return handle_->forward(std::forward<Args>(args)...);
    } else {
      // A TESSERA_MODULE with arguments left to their defaults.
      return handle_(std::forward<Args>(args)...);
    }
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
  Handle handle_;
};

namespace detail {
void parallelize(torch::nn::Module* root, const DeviceMesh& mesh, const ParallelPlan& plan,
                 const ParallelizeOptions& options);
// Of the module that `tree` describes; what it throws, every rank throws.
void parallelize(const std::function<ModuleTree()>& tree, const DeviceMesh& mesh, const ParallelPlan& plan,
                 const ParallelizeOptions& options);
}  // namespace detail

// Lays the parameters and buffers of an unmodified module out over the mesh, in place: every handle to one (the
// module's member, an optimizer's parameter, a tied weight) is a DTensor afterwards, with the same requires_grad, dtype
// and sharing, and .grad converted too. What no pattern names is replicated. Activations meet the parameters as the
// styles say, and stay DTensors between styled modules.
//
// `plan` gives styles to modules by name; see `match` in module_tree.h. One style alone is the root's.
//   auto tp = parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
//
// Communication: one all-reduce of 40 bytes a mesh dimension, by which the ranks agree that all can go on and that
// their modules and plans are alike; then for each parameter and buffer what distribute_tensor takes: at most one
// scatter and one broadcast. None with kNoSource.
// Throws, on every rank of the mesh alike and before anything is converted, what the lowest rank's planning threw, and
// std::invalid_argument for: modules or plans that differ between ranks (not with kNoSource); a pattern that matches
// nothing; a module with two styles of which none is a Prepare style; a style that does not know its module; styles
// that disagree on a tied parameter; parameters that overlap in memory without being the same; an optimizer with state;
// no module. With kNoSource, which every rank must then give, a rank throws for itself, and what is not
// std::invalid_argument fails the job. On a rank outside the mesh the parameters become DTensors without a piece; it
// hears nothing of the other ranks' errors.
template <std::derived_from<torch::nn::Module> M>
Parallelized<M*> parallelize_module(M& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                                    const ParallelizeOptions& options = {}) {
  detail::parallelize(&module, mesh, plan, options);
  return Parallelized<M*>(&module);
}

// The same for a holder (torch::nn::Linear, your TORCH_MODULE), a shared_ptr to a module, a torch::nn::AnyModule.
template <class Handle>
requires(!std::derived_from<Handle, torch::nn::Module> && requires(Handle h) { h.ptr(); })
    Parallelized<Handle> parallelize_module(Handle handle, const DeviceMesh& mesh, const ParallelPlan& plan,
                                            const ParallelizeOptions& options = {}) {
  detail::parallelize(handle.ptr().get(), mesh, plan, options);
  return Parallelized<Handle>(std::move(handle));
}
template <std::derived_from<torch::nn::Module> M>
Parallelized<std::shared_ptr<M>> parallelize_module(std::shared_ptr<M> module, const DeviceMesh& mesh,
                                                    const ParallelPlan& plan, const ParallelizeOptions& options = {}) {
  detail::parallelize(module.get(), mesh, plan, options);
  return Parallelized<std::shared_ptr<M>>(std::move(module));
}
template <class Module>
auto parallelize_module(Module&& module, const DeviceMesh& mesh, const Style& style,
                        const ParallelizeOptions& options = {}) {
  return parallelize_module(std::forward<Module>(module), mesh, ParallelPlan{{"", style}}, options);
}

}  // namespace tessera

#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/jit/api/module.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/module_tree.h"
#include "tessera/styles/parallelize.h"

namespace tessera {

// A TorchScript module with its forward called under ImplicitReplication, as Parallelized does for torch::nn.
// TorchScript's optimizer is off while it runs, on this thread alone: it makes mm and add of addmm, whose contract
// would be lost, and fused kernels for CUDA read data pointers, which DTensors have not.
//   auto tp = parallelize_module(script, mesh, plan);   tp(ids).toTensor();   tp->eval();
// Shares the module with the handle that it was made of.
class ParallelizedScript {
 public:
  explicit ParallelizedScript(torch::jit::Module module) : module_(std::move(module)) {}

  template <class... Args>
  at::IValue operator()(Args&&... args) {
    return forward({at::IValue(std::forward<Args>(args))...});
  }
  at::IValue forward(std::vector<at::IValue> inputs, const torch::jit::Kwargs& named = {});

  torch::jit::Module* operator->() { return &module_; }
  torch::jit::Module& handle() { return module_; }

 private:
  torch::jit::Module module_;
};

// parallelize_module for a scripted or traced module, as torch::jit::load gives it: the same plans, patterns, styles
// and options. Modules have their qualified names for types, without "__torch__." and mangling:
// torch.nn.modules.linear.Linear and torch.nn.modules.sparse.Embedding are what styles know as Linear and Embedding,
// torch.nn.modules.activation.MultiheadAttention as an attention, and classes called Conv1D as GPT-2's. Compiled code
// that earlier calls left is dropped: it was specialized for plain tensors.
// Communication and errors: as for torch::nn. Throws std::invalid_argument, too, for a frozen or optimized module,
// whose weights are constants of its code, and for a Prepare style, which needs hooks.
ParallelizedScript parallelize_module(const torch::jit::Module& module, const DeviceMesh& mesh,
                                      const ParallelPlan& plan, const ParallelizeOptions& options = {});

// The modules of a script module. Throws std::invalid_argument when it is frozen or optimized.
ModuleTree tree_of(const torch::jit::Module& root);

}  // namespace tessera

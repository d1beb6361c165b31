#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/module_tree.h"
#include "tessera/styles/parallelize.h"

namespace tessera {

// A TorchScript module whose forward is called under ImplicitReplication, as Parallelized does for torch::nn. While
// forward runs, TorchScript's optimizer is off on this thread, and it never acts on the module's functions: it rewrites
// addmm as mm and add, which would lose addmm's contract, and its fused CUDA kernels read data pointers, which DTensors
// do not have. TorchScript throws what an operator throws as std::runtime_error, with its text.
// Where several ranks split the batch, unless under InferenceMode, a call with plain tensors and no DTensor throws
// std::invalid_argument; see ParallelizeOptions::allow_plain.
//   auto tp = parallelize_module(script, mesh, plan);   tp(ids).toTensor();   tp->eval();
// It shares the module with the handle that it was made from.
class ParallelizedScript {
 public:
  explicit ParallelizedScript(torch::jit::Module module, detail::Calling calling = {})
      : module_(std::move(module)), calling_(std::move(calling)) {}

  // Calls the module, with the hooks of its type.
  template <class... Args>
  at::IValue operator()(Args&&... args) {
    return call({at::IValue(std::forward<Args>(args))...});
  }
  // Calls its forward alone, as torch::jit::Module::forward does.
  at::IValue forward(std::vector<at::IValue> inputs, const torch::jit::Kwargs& named = {});
  // Calls another method in the same way. Throws c10::Error, as LibTorch does, if there is no such method.
  at::IValue run_method(const std::string& name, std::vector<at::IValue> inputs, const torch::jit::Kwargs& named = {});

  torch::jit::Module* operator->() { return &module_; }
  torch::jit::Module& handle() { return module_; }

 private:
  at::IValue call(std::vector<at::IValue> inputs);

  torch::jit::Module module_;
  detail::Calling calling_;
};

// Is parallelize_module for a scripted or traced module, such as torch::jit::load returns, with the same plans,
// patterns, styles and options. A module's type is its qualified name without "__torch__." and mangling. Styles treat
// torch.nn.modules.linear.Linear as Linear, torch.nn.modules.sparse.Embedding as Embedding,
// torch.nn.modules.activation.MultiheadAttention as an attention, and classes called Conv1D as GPT-2's. Code that
// earlier calls compiled is dropped, since it was specialized for plain tensors, and TorchScript's optimizer no longer
// acts on the module's functions, which copies of the module share.
// Communication and errors are those for torch::nn. It also throws std::invalid_argument for a frozen or optimized
// module, whose weights are constants of its code; for a Prepare style, which needs hooks; and, where the module's code
// switches autocast itself, for a compute_dtype and for arguments of autocast that are no constants.
ParallelizedScript parallelize_module(const torch::jit::Module& module, const DeviceMesh& mesh,
                                      const ParallelPlan& plan, const ParallelizeOptions& options = {});

// Returns a module of torch::nn that has the submodules, parameters and buffers of a TorchScript module under their
// names, and no forward. The tensors are the same, so that save_weights, load_weights, training states, optimizers and
// clip_grad_norm_, which take a torch::nn::Module or its parameters, work on those of `module`. A parameter that has
// several names is a parameter by the first of them, so that an optimizer updates it once, and a buffer by the others.
// Call it after parallelize_module. A tensor that replaces one of `module` later is not seen: where forward assigns a
// buffer (self.n = ...), call weights_of again before each save and load. Does not communicate. Throws
// std::invalid_argument, in the words of parallelize_module, when `module` is frozen or optimized, or calls
// torch.jit.fork.
std::shared_ptr<torch::nn::Module> weights_of(const torch::jit::Module& module);

// Returns the modules of a TorchScript module. Throws std::invalid_argument when it is frozen or optimized.
ModuleTree tree_of(const torch::jit::Module& root);

}  // namespace tessera

#pragma once

#include <set>

#include <torch/csrc/jit/api/module.h>

namespace tessera {

// Holds what parallelize_module has to know of the code of a TorchScript module.
struct ScriptCode {
  std::set<torch::jit::GraphFunction*> functions;  // the methods and hooks of its modules, and what they call
  bool has_autocast = false;                       // one of them has a block "with torch.autocast(...)"
};

// Reads each function once. Throws std::invalid_argument, with the path of the module, when the module is frozen,
// optimized or quantized, so that its weights are constants of its code or packed, and when it calls torch.jit.fork.
ScriptCode read_code(const torch::jit::Module& root);

// Makes the functions run as they are written, which the optimizer would change: from now on, also where the module
// itself or a copy of it, which shares them, is called. Operators see autocast as they do elsewhere. Where the code
// itself switches autocast, LibTorch writes casts into it, which it does only while the optimizer is on. Throws
// std::invalid_argument where it cannot.
void run_as_written(const ScriptCode& code);

}  // namespace tessera

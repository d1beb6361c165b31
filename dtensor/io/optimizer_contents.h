#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/optimizer_kind.h"

namespace tessera {

// Holds what save_optimizer writes.
using OptimizerContents = SavedContents;
// Throws std::invalid_argument as save_optimizer does, on this rank alone; `op` begins the messages.
OptimizerContents optimizer_contents(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                                     const char* op);

// Loads an optimizer's state in three steps, so that all ranks can agree between them: plan() checks what the file has,
// read() reads this rank's pieces, and apply() changes the optimizer.
class OptimizerLoad {
 public:
  // Throws std::invalid_argument on a parameter that `module` does not have, and on a class that is not supported. `op`
  // begins the messages, also those of plan().
  OptimizerLoad(torch::optim::Optimizer& optimizer, const torch::nn::Module& module, const char* op);

  // Throws std::invalid_argument on what does not fit. `checkpoint` must live until read() has returned.
  void plan(const Checkpoint& checkpoint, const std::string& path);
  void read();
  void apply();

 private:
  torch::optim::Optimizer& optimizer_;
  const char* const op_;
  const OptimizerKind& kind_;
  const std::vector<std::vector<std::string>> paths_;  // the parameters of each group, by their first path
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
  std::vector<std::pair<void*, PlannedState>> planned_;
  std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> states_;
};

}  // namespace tessera

#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/named_tensors.h"

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
class OptimizerParamState;
}  // namespace torch::optim

namespace tessera {

// Holds one parameter's state from a file, made in two steps: what can fail on one rank alone (reading) runs after all
// ranks have agreed on the rest.
struct PlannedState {
  std::string first_tensor;  // the first name of the state's tensors, in alphabetical order
  // Reads the planned pieces and returns the state, with its tensors laid out as their parameter, or replicated.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> read;
};

// Saves and loads the state and options of one of torch::optim's classes.
class OptimizerKind {
 public:
  virtual ~OptimizerKind() = default;

  virtual const char* name() const = 0;

  // Appends the state as tensors named "<parameter>/<field>".
  virtual void append_state(const torch::optim::OptimizerParamState& state, const std::string& parameter,
                            std::vector<SavedTensor>& tensors) const = 0;
  // Checks the state that `unused`, names of tensors in `checkpoint`, has for the parameter `tensor`, and removes its
  // names from there. The result's `read` is empty when there is none. Throws std::invalid_argument that names what
  // does not fit; `op` begins the message. `checkpoint` must outlive the result.
  virtual PlannedState plan_state(const Checkpoint& checkpoint, const std::string& parameter, const at::Tensor& tensor,
                                  std::set<std::string>& unused, const char* op) const = 0;

  virtual nlohmann::ordered_json options_json(const torch::optim::OptimizerOptions& options) const = 0;
  // Returns a copy of `base` with the options of `json`. Throws std::invalid_argument on a missing, unknown or
  // ill-typed option; `op` begins the message.
  virtual std::unique_ptr<torch::optim::OptimizerOptions> read_options(const nlohmann::json& json,
                                                                       const torch::optim::OptimizerOptions& base,
                                                                       const char* op) const = 0;
};

// Returns the kind of `optimizer`. Throws std::invalid_argument on any class but the six, and names them; `op` begins
// the message.
const OptimizerKind& optimizer_kind(const torch::optim::Optimizer& optimizer, const char* op);

}  // namespace tessera

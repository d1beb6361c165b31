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

// The state of one parameter as it comes from a file: made in two steps, for all that can fail on one rank alone
// (reading) comes after every rank has agreed on the rest.
struct PlannedState {
  std::string parameter;
  // Reads the planned pieces and gives the state, its tensors laid out as their parameter is, or replicated.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> read;
};

// One of torch::optim's classes, as saving and loading see it.
class OptimizerKind {
 public:
  virtual ~OptimizerKind() = default;

  virtual const char* name() const = 0;

  // Appends the state as tensors named "<parameter>/<field>".
  virtual void append_state(const torch::optim::OptimizerParamState& state, const std::string& parameter,
                            std::vector<SavedTensor>& tensors) const = 0;
  // Checks the state that `checkpoint` has for the parameter `tensor` and takes the names off `unused`. Its read is
  // empty when there is none. Throws std::invalid_argument by name. `checkpoint` must outlive the result.
  virtual PlannedState plan_state(const Checkpoint& checkpoint, const std::string& parameter, const at::Tensor& tensor,
                                  std::set<std::string>& unused) const = 0;

  virtual nlohmann::ordered_json options_json(const torch::optim::OptimizerOptions& options) const = 0;
  // A copy of `base` with the options of `json`. Throws std::invalid_argument on a missing, unknown or ill-typed
  // option.
  virtual std::unique_ptr<torch::optim::OptimizerOptions> read_options(
      const nlohmann::json& json, const torch::optim::OptimizerOptions& base) const = 0;
};

// The kind of `optimizer`. Throws std::invalid_argument on a class that is none of the six, naming them; `op` begins
// the message.
const OptimizerKind& optimizer_kind(const torch::optim::Optimizer& optimizer, const char* op);

}  // namespace tessera

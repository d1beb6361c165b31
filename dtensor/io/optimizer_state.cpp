#include "tessera/dtensor/io/optimizer_state.h"

#include <algorithm>
#include <optional>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/optimizer_kind.h"
#include "tessera/mesh/core/deferred_tensor.h"

namespace tessera {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// Lists the parameters of each group, by their first path in the module.
using GroupPaths = std::vector<std::vector<std::string>>;

GroupPaths group_paths(const Optimizer& optimizer, const torch::nn::Module& module, const char* op) {
  std::unordered_map<const c10::TensorImpl*, std::string> paths;
  for (const ModuleTensor& item : module_tensors(module))
    paths.emplace(item.tensor.unsafeGetTensorImpl(), item.names.front());
  // This also adds a registered tensor that an assigned weight has replaced: the optimizer was given it all the same.
  for (const auto& item : module.named_parameters()) paths.emplace(item.value().unsafeGetTensorImpl(), item.key());
  GroupPaths groups;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    groups.emplace_back();
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto found = paths.find(params[i].unsafeGetTensorImpl());
      if (found == paths.end()) {
        throw std::invalid_argument(
            fmt::format("{}: parameter {} of group {} of the optimizer (shape [{}]) is not in the module; "
                        "pass the module whose parameters the optimizer was made of",
                        op, i, g, fmt::join(params[i].sizes(), ", ")));
      }
      groups.back().push_back(found->second);
    }
  }
  return groups;
}

std::string groups_json(const Optimizer& optimizer, const OptimizerKind& kind, const GroupPaths& paths) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::array();
  for (std::size_t g = 0; g < paths.size(); ++g) {
    groups.push_back({{"options", kind.options_json(optimizer.param_groups()[g].options())}, {"params", paths[g]}});
  }
  return groups.dump();
}

// Holds what the file has for the optimizer, checked but not applied yet.
struct Planned {
  std::vector<std::unique_ptr<OptimizerOptions>> options;
  std::vector<std::pair<void*, PlannedState>> states;
};

const std::string& metadata_of(const Checkpoint& checkpoint, const char* key, const std::string& path) {
  const auto found = checkpoint.metadata().find(key);
  if (found != checkpoint.metadata().end()) return found->second;
  throw std::invalid_argument(
      fmt::format("load_optimizer: '{}' has no '{}' in its __metadata__; it was not written by "
                  "save_optimizer",
                  path, key));
}

nlohmann::json parse_groups(const Checkpoint& checkpoint, const std::string& path) {
  nlohmann::json groups =
      nlohmann::json::parse(metadata_of(checkpoint, "param_groups", path), nullptr, /*allow_exceptions=*/false);
  const auto is_group = [](const nlohmann::json& group) {
    return group.is_object() && group.size() == 2 && group.contains("options") && group["options"].is_object() &&
           group.contains("params") && group["params"].is_array();
  };
  if (groups.is_array() && std::ranges::all_of(groups, is_group)) return groups;
  throw std::invalid_argument(
      fmt::format("load_optimizer: '{}': param_groups is not a list of {{options, params}}", path));
}

void check_class(const Checkpoint& checkpoint, const OptimizerKind& kind, const std::string& path) {
  const std::string& saved = metadata_of(checkpoint, "optimizer", path);
  if (saved == kind.name()) return;
  throw std::invalid_argument(
      fmt::format("load_optimizer: '{}' holds the state of {}, the optimizer is {}; make one of that class", path,
                  saved, kind.name()));
}

void check_params(const nlohmann::json& saved, const std::vector<std::string>& params, std::size_t group,
                  const std::string& path) {
  const nlohmann::json here = params;
  if (saved == here) return;
  std::size_t i = 0;
  while (i < saved.size() && i < here.size() && saved[i] == here[i]) ++i;
  const auto at = [i](const nlohmann::json& list) { return i < list.size() ? list[i].dump() : "the end of the list"; };
  throw std::invalid_argument(
      fmt::format("load_optimizer: group {} of '{}' has {} parameters, that of the optimizer {}; the first "
                  "that differs is {} in the file and {} here",
                  group, path, saved.size(), here.size(), at(saved), at(here)));
}

Planned plan(const Optimizer& optimizer, const OptimizerKind& kind, const GroupPaths& paths,
             const Checkpoint& checkpoint, const std::string& path) {
  check_class(checkpoint, kind, path);
  const nlohmann::json groups = parse_groups(checkpoint, path);
  if (groups.size() != paths.size()) {
    throw std::invalid_argument(
        fmt::format("load_optimizer: '{}' has {} parameter groups, the optimizer {}; make the groups as they were when "
                    "it was saved",
                    path, groups.size(), paths.size()));
  }
  std::set<std::string> unused;
  for (const auto& [name, entry] : checkpoint.tensors()) unused.insert(name);
  Planned planned;
  for (std::size_t g = 0; g < paths.size(); ++g) {
    check_params(groups[g]["params"], paths[g], g, path);
    planned.options.push_back(kind.read_options(groups[g]["options"], optimizer.param_groups()[g].options()));
    for (std::size_t i = 0; i < paths[g].size(); ++i) {
      const at::Tensor& param = optimizer.param_groups()[g].params()[i];
      PlannedState state = kind.plan_state(checkpoint, paths[g][i], param, unused);
      if (state.read) planned.states.emplace_back(param.unsafeGetTensorImpl(), std::move(state));
    }
  }
  if (unused.empty()) return planned;
  throw std::invalid_argument(fmt::format("load_optimizer: '{}' holds what {} does not keep for these parameters: {}",
                                          path, kind.name(), list_names({unused.begin(), unused.end()})));
}

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

}  // namespace

void save_optimizer(const Optimizer& optimizer, const torch::nn::Module& module, const std::string& path) {
  const detail::NotDeferred own_tensors;
  const OptimizerKind& kind = optimizer_kind(optimizer, "save_optimizer");
  const GroupPaths paths = group_paths(optimizer, module, "save_optimizer");
  // A tied parameter may be in a group twice; its state is saved once.
  std::set<const void*> seen;
  std::vector<SavedTensor> tensors;
  for (std::size_t g = 0; g < paths.size(); ++g) {
    for (std::size_t i = 0; i < paths[g].size(); ++i) {
      void* const param = optimizer.param_groups()[g].params()[i].unsafeGetTensorImpl();
      const auto state = optimizer.state().find(param);
      if (state != optimizer.state().end() && seen.insert(param).second)
        kind.append_state(*state->second, paths[g][i], tensors);
    }
  }
  save_tensors(tensors, meshes_of(parameters_of(optimizer)), path, 0,
               {{"format", "pt"}, {"optimizer", kind.name()}, {"param_groups", groups_json(optimizer, kind, paths)}},
               "save_optimizer");
}

void load_optimizer(Optimizer& optimizer, const torch::nn::Module& module, const std::string& path) {
  const detail::NotDeferred own_tensors;
  const OptimizerKind& kind = optimizer_kind(optimizer, "load_optimizer");
  const GroupPaths paths = group_paths(optimizer, module, "load_optimizer");
  const Agreement agreement(meshes_of(parameters_of(optimizer)), "load_optimizer");
  std::optional<Checkpoint> checkpoint;
  Planned planned;
  agreement.run([&] {
    checkpoint.emplace(path);
    planned = plan(optimizer, kind, paths, *checkpoint, path);
  });
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> states;
  agreement.run([&] {
    for (const auto& [param, state] : planned.states) states.emplace_back(param, state.read());
  });
  optimizer.state().clear();
  for (auto& [param, state] : states) optimizer.state()[param] = std::move(state);
  for (std::size_t g = 0; g < planned.options.size(); ++g) {
    optimizer.param_groups()[g].set_options(std::move(planned.options[g]));
  }
}

}  // namespace tessera

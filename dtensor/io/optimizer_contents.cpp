#include "tessera/dtensor/io/optimizer_contents.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/optimizer_kind.h"
#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

using torch::optim::Optimizer;

using GroupPaths = std::vector<std::vector<std::string>>;  // the parameters of each group, by their first path

// Names tensors of a module so that no two of those that are registered share a path: each has the first under which it
// is registered, also where an assigned tensor has replaced it, since the optimizer was given it all the same. A tensor
// that is only assigned has the path of the one that it replaces.
std::unordered_map<const c10::TensorImpl*, std::string> paths_in(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> paths;
  for (const auto& item : module.named_parameters()) paths.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (const ModuleTensor& item : module_tensors(module))
    paths.emplace(item.tensor.unsafeGetTensorImpl(), item.names.front());
  return paths;
}

// Throws where the optimizer has both a tensor that is only assigned and the one that it replaces: their states would
// have the same name.
void check_different(const Optimizer& optimizer, const GroupPaths& paths, const char* op) {
  std::map<std::string, const c10::TensorImpl*> named;
  for (std::size_t g = 0; g < paths.size(); ++g) {
    for (std::size_t i = 0; i < paths[g].size(); ++i) {
      const c10::TensorImpl* const param = optimizer.param_groups()[g].params()[i].unsafeGetTensorImpl();
      if (named.emplace(paths[g][i], param).first->second == param) continue;
      throw std::invalid_argument(
          fmt::format("{}: the optimizer has two tensors for {}: the registered one, and one that was assigned in its "
                      "place; make it of the assigned one alone, which forward reads",
                      op, in_quotes(paths[g][i])));
    }
  }
}

GroupPaths group_paths(const Optimizer& optimizer, const torch::nn::Module& module, const char* op) {
  const std::unordered_map<const c10::TensorImpl*, std::string> paths = paths_in(module);
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
  check_different(optimizer, groups, op);
  return groups;
}

constexpr std::size_t kMostBytesOfGroups = std::size_t{16} << 20;

std::string groups_json(const Optimizer& optimizer, const OptimizerKind& kind, const GroupPaths& paths,
                        const char* op) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::array();
  for (std::size_t g = 0; g < paths.size(); ++g) {
    groups.push_back({{"options", kind.options_json(optimizer.param_groups()[g].options())}, {"params", paths[g]}});
  }
  std::string text = groups.dump();
  if (text.size() <= kMostBytesOfGroups) return text;
  throw std::invalid_argument(
      fmt::format("{}: the options and the names of the parameters would have {} bytes as param_groups, and at most {} "
                  "are read; give the optimizer fewer parameters, or the parameters shorter names",
                  op, text.size(), kMostBytesOfGroups));
}

const std::string& metadata_of(const Checkpoint& checkpoint, const char* key, const std::string& path, const char* op) {
  const auto found = checkpoint.metadata().find(key);
  if (found != checkpoint.metadata().end()) return found->second;
  throw std::invalid_argument(
      fmt::format("{}: '{}' has no '{}' in its __metadata__; it was not written by save_optimizer", op, path, key));
}

nlohmann::json parse_groups(const Checkpoint& checkpoint, const std::string& path, const char* op) {
  nlohmann::json groups =
      parse_unique_json(metadata_of(checkpoint, "param_groups", path, op), kMostBytesOfGroups, path, "param_groups");
  const auto is_group = [](const nlohmann::json& group) {
    return group.is_object() && group.size() == 2 && group.contains("options") && group["options"].is_object() &&
           group.contains("params") && group["params"].is_array();
  };
  if (groups.is_array() && std::ranges::all_of(groups, is_group)) return groups;
  throw std::invalid_argument(fmt::format("{}: '{}': param_groups is not a list of {{options, params}}", op, path));
}

void check_class(const Checkpoint& checkpoint, const OptimizerKind& kind, const std::string& path, const char* op) {
  const std::string& saved = metadata_of(checkpoint, "optimizer", path, op);
  if (saved == kind.name()) return;
  throw std::invalid_argument(fmt::format("{}: '{}' holds the state of {}, the optimizer is {}; make one of that class",
                                          op, path, in_quotes(saved), kind.name()));
}

void check_params(const nlohmann::json& saved, const std::vector<std::string>& params, std::size_t group,
                  const std::string& path, const char* op) {
  const nlohmann::json here = params;
  if (saved == here) return;
  std::size_t i = 0;
  while (i < saved.size() && i < here.size() && saved[i] == here[i]) ++i;
  const auto at = [i](const nlohmann::json& list) {
    if (i >= list.size()) return std::string("the end of the list");
    return in_quotes(list[i].is_string() ? list[i].get<std::string>() : list[i].dump());
  };
  throw std::invalid_argument(
      fmt::format("{}: group {} of '{}' has {} parameters, that of the optimizer {}; the first that differs is {} in "
                  "the file and {} here",
                  op, group, path, saved.size(), here.size(), at(saved), at(here)));
}

}  // namespace

OptimizerContents optimizer_contents(const Optimizer& optimizer, const torch::nn::Module& module, const char* op) {
  const OptimizerKind& kind = optimizer_kind(optimizer, op);
  const GroupPaths paths = group_paths(optimizer, module, op);
  OptimizerContents contents = {
      .tensors = {},
      .metadata = {
          {"format", "pt"}, {"optimizer", kind.name()}, {"param_groups", groups_json(optimizer, kind, paths, op)}}};
  // A tied parameter may be in a group twice; its state is saved once.
  std::set<const void*> seen;
  for (std::size_t g = 0; g < paths.size(); ++g) {
    for (std::size_t i = 0; i < paths[g].size(); ++i) {
      void* const param = optimizer.param_groups()[g].params()[i].unsafeGetTensorImpl();
      const auto state = optimizer.state().find(param);
      if (state != optimizer.state().end() && seen.insert(param).second)
        kind.append_state(*state->second, paths[g][i], contents.tensors);
    }
  }
  return contents;
}

OptimizerLoad::OptimizerLoad(Optimizer& optimizer, const torch::nn::Module& module, const char* op)
    : optimizer_(optimizer),
      op_(op),
      kind_(optimizer_kind(optimizer, op)),
      paths_(group_paths(optimizer, module, op)) {}

void OptimizerLoad::plan(const Checkpoint& checkpoint, const std::string& path) {
  check_class(checkpoint, kind_, path, op_);
  const nlohmann::json groups = parse_groups(checkpoint, path, op_);
  if (groups.size() != paths_.size()) {
    throw std::invalid_argument(fmt::format(
        "{}: '{}' has {} parameter groups, the optimizer {}; make the groups as they were when it was saved", op_, path,
        groups.size(), paths_.size()));
  }
  std::set<std::string> unused;
  for (const auto& [name, entry] : checkpoint.tensors()) unused.insert(name);
  for (std::size_t g = 0; g < paths_.size(); ++g) {
    check_params(groups[g]["params"], paths_[g], g, path, op_);
    options_.push_back(kind_.read_options(groups[g]["options"], optimizer_.param_groups()[g].options(), op_));
    for (std::size_t i = 0; i < paths_[g].size(); ++i) {
      const at::Tensor& param = optimizer_.param_groups()[g].params()[i];
      PlannedState state = kind_.plan_state(checkpoint, paths_[g][i], param, unused, op_);
      if (state.read) planned_.emplace_back(param.unsafeGetTensorImpl(), std::move(state));
    }
  }
  // Tensors are read in the order of their data, as far as the parameters have one: no block is read twice.
  std::ranges::sort(planned_, {}, [&](const auto& item) { return checkpoint.position_of(item.second.first_tensor); });
  if (unused.empty()) return;
  throw std::invalid_argument(
      fmt::format("{}: '{}' holds what {} does not keep for these parameters: {}; load it into the class and options "
                  "of optimizer with which it was saved",
                  op_, path, kind_.name(), list_names({unused.begin(), unused.end()})));
}

void OptimizerLoad::read() {
  for (const auto& [param, state] : planned_) states_.emplace_back(param, state.read());
}

void OptimizerLoad::apply() {
  optimizer_.state().clear();
  for (auto& [param, state] : states_) optimizer_.state()[param] = std::move(state);
  for (std::size_t g = 0; g < options_.size(); ++g) {
    optimizer_.param_groups()[g].set_options(std::move(options_[g]));
  }
}

}  // namespace tessera

#include "tessera/styles/layout_plan.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <unordered_map>

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/reused_memory.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

// Returns the range [begin, end) of its storage, in elements, that a tensor may touch.
std::pair<int64_t, int64_t> extent(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
  return {t.storage_offset(), t.storage_offset() + last + 1};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto [a_begin, a_end] = extent(a);
  const auto [b_begin, b_end] = extent(b);
  const auto a_size = static_cast<int64_t>(a.element_size());
  const auto b_size = static_cast<int64_t>(b.element_size());
  return a_begin * a_size < b_end * b_size && b_begin * b_size < a_end * a_size;
}

bool same_elements(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

bool has_memory(const at::Tensor& t) {
  return !is_dtensor(t) && t.layout() == at::kStrided && t.has_storage() && t.numel() > 0;
}

// Returns for each tensor the index of the first tensor that views the same elements, or its own. Throws when two
// tensors overlap in any other way.
std::vector<std::size_t> first_alike(const std::vector<TensorPlan>& tensors) {
  std::vector<std::size_t> alike(tensors.size());
  std::unordered_map<const void*, std::vector<std::size_t>> by_storage;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    alike[i] = i;
    const at::Tensor& t = tensors[i].tensor;
    if (!has_memory(t)) continue;
    std::vector<std::size_t>& others = by_storage[t.storage().unsafeGetStorageImpl()];
    for (const std::size_t other : others) {
      if (!overlap(tensors[other].tensor, t)) continue;
      if (!same_elements(tensors[other].tensor, t)) {
        throw std::invalid_argument(fmt::format(
            "parallelize_module: {} and {} view overlapping parts of one storage, and laying out each over the ranks "
            "would separate them; give each its own memory (clone), or register one tensor under both names",
            tensors[other].paths.front(), tensors[i].paths.front()));
      }
      alike[i] = alike[other];
      break;
    }
    others.push_back(i);
  }
  return alike;
}

void check_convertible(const TensorPlan& plan) {
  const at::Tensor& t = plan.tensor;
  const std::string& path = plan.paths.front();
  if (is_dtensor(t)) return;
  const auto refuse = [&](const char* what, const char* remedy) {
    throw std::invalid_argument(fmt::format("parallelize_module: {} {}; {}", path, what, remedy));
  };
  if (!t.is_leaf()) refuse("is the result of an operator, not a leaf", "register a leaf tensor, such as t.detach()");
  if (t.layout() != at::kStrided)
    refuse("is sparse", "only dense tensors have a layout over ranks; call to_dense() first");
  if (t.grad().defined() && t.grad().layout() != at::kStrided)
    refuse("has a sparse gradient", "call zero_grad() on the module first");
  if (t.is_quantized()) refuse("is quantized", "dequantize it first");
  if (t.is_meta() && !detail::is_deferred(t))
    refuse("is on the meta device, without values", "build it on a device, or under ShardedInit");
}

// Throws where what a style has placed does not cut the tensor, naming both.
void check_fits(const TensorPlan& plan, const Placements& placements, const Mesh& mesh) {
  const std::string who = fmt::format("parallelize_module: {}, placed by {}", plan.paths.front(), plan.placed_by);
  check_layout(normalize(placements, mesh, plan.tensor.dim(), who), mesh, plan.tensor.sizes(), who);
}

// With use_local_output the result is plain: one rank's piece of the batch. A gathered bias cannot be added to that.
void check_gathered(const TensorPlan& plan) {
  for (const Contract& contract : plan.contracts) {
    if (!contract.use_local_output) continue;
    throw std::invalid_argument(
        fmt::format("parallelize_module: {} ({}): use_local_output does not go with data_placement; leave one of them "
                    "out: a DTensor output says which piece of the batch it is, and a plain one does not",
                    contract.path, contract.style));
  }
}

// An operator that reads no contracts would silently ignore this one.
void check_operators(const Contract& contract) {
  for (const std::string& op : contract.operators) {
    if (op == "add" && !contract.use_local_output) {
      throw std::invalid_argument(
          fmt::format("parallelize_module: {} ({}): a contract for add is only for a bias that is added to a plain "
                      "result; set use_local_output, or leave add out: adding to a DTensor needs no contract",
                      contract.path, contract.style));
    }
    if (reads_contracts(op)) continue;
    throw std::invalid_argument(fmt::format(
        "parallelize_module: {} ({}): the operator '{}' reads no contracts; those that do are {}. Elsewhere DTensors "
        "follow the operator's own rule: leave the operator out, and give the module a DTensor",
        contract.path, contract.style, op, fmt::join(kContractOperators, ", ")));
  }
}

std::string text_of(const Contract& contract) {
  std::string text = fmt::format(", {}: {} -> {}", fmt::join(contract.operators, " "),
                                 tessera::to_string(contract.input), tessera::to_string(contract.desired));
  if (contract.output) text += fmt::format(", output {}", tessera::to_string(*contract.output));
  if (contract.use_local_output) text += ", local output";
  if (contract.gather_input_again) text += ", input gathered again";
  return text;
}

const char* kDone = "is a DTensor already, so another call has parallelized it; let one plan name all styles";

}  // namespace

LayoutPlan::LayoutPlan(DeviceMesh mesh, std::optional<int64_t> tensor_dim, const ModuleTree& tree)
    : mesh_(std::move(mesh)), tensor_dim_(tensor_dim) {
  for (const ModuleNode& node : tree) {
    std::map<std::string, std::size_t> by_name;
    for (const NamedTensor& item : node.tensors) {
      const auto known = static_cast<std::size_t>(tensors_.size());
      const std::size_t index = add(joined_path(node.path, item.name), item);
      const auto [first, is_first] = by_name.emplace(item.name, index);
      if (is_first) {
        tensors_[index].replaced_by.reset();
      } else if (index == known && item.is_parameter) {
        tensors_[index].replaced_by = first->second;
      }
    }
  }
}

// Returns the entry of the tensor, a new one if it has none.
std::size_t LayoutPlan::add(const std::string& path, const NamedTensor& item) {
  const auto [at, is_new] = index_.emplace(item.tensor.unsafeGetTensorImpl(), tensors_.size());
  if (is_new) {
    tensors_.push_back({.tensor = item.tensor,
                        .is_parameter = item.is_parameter,
                        .paths = {},
                        .placement = {},
                        .placed_by = {},
                        .contracts = {},
                        .replaced_by = {}});
  }
  std::vector<std::string>& paths = tensors_[at->second].paths;
  if (std::find(paths.begin(), paths.end(), path) == paths.end()) paths.push_back(path);
  return at->second;
}

TensorPlan& LayoutPlan::plan_of(const at::Tensor& tensor, const std::string& by) {
  TensorPlan& plan = tensors_.at(index_.at(tensor.unsafeGetTensorImpl()));
  if (is_dtensor(tensor)) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: {}: the parameter {} {}", by, plan.paths.front(), kDone));
  }
  return plan;
}

void LayoutPlan::place(const at::Tensor& tensor, const Placement& placement, const std::string& by) {
  TensorPlan& plan = plan_of(tensor, by);
  const Placement wanted = on_mesh_dim({Replicate()}, 0, placement, tensor.dim()).front();
  if (wanted.is_partial() || (wanted.is_shard() && (wanted.tensor_dim() < 0 || wanted.tensor_dim() >= tensor.dim()))) {
    throw std::invalid_argument(fmt::format(
        "parallelize_module: {}: {} of shape [{}] cannot have placement {}; a parameter is Replicate or a Shard of one "
        "of its dimensions",
        by, plan.paths.front(), fmt::join(tensor.sizes(), ", "), tessera::to_string(placement)));
  }
  if (plan.placement && *plan.placement != wanted) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: {} {} one tensor: {} lays it out as {}, and {} as {}; give both modules "
                    "styles that agree, or each its own tensor",
                    fmt::join(plan.paths, " and "), plan.paths.size() == 1 ? "is" : "are", plan.placed_by,
                    tessera::to_string(*plan.placement), by, tessera::to_string(wanted)));
  }
  if (!plan.placement) plan.placed_by = by;
  plan.placement = wanted;
}

void LayoutPlan::add_contract(const at::Tensor& tensor, const Contract& contract) {
  check_operators(contract);
  TensorPlan& plan = plan_of(tensor, contract.path);
  for (const Contract& other : plan.contracts) {
    Contract as_other = contract;
    as_other.path = other.path;
    as_other.style = other.style;
    if (as_other == other) return;
    for (const std::string& op : contract.operators) {
      if (!other.names(op)) continue;
      throw std::invalid_argument(
          fmt::format("parallelize_module: {} and {} are one tensor, and their styles say different layouts for the "
                      "operator '{}'; give both modules the same style and options, or each its own tensor",
                      other.path, contract.path, op));
    }
  }
  plan.contracts.push_back(contract);
}

void LayoutPlan::check() const {
  for (const TensorPlan& plan : tensors_) {
    check_convertible(plan);
    if (plan.placement) check_fits(plan, placements_of(plan), mesh_.mesh());
    if (!sharding_.mesh_dims.empty()) check_gathered(plan);
  }
  const std::vector<std::size_t> alike = first_alike(tensors_);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const TensorPlan& first = tensors_[alike[i]];
    if (placements_of(first) == placements_of(tensors_[i])) continue;
    throw std::invalid_argument(fmt::format(
        "parallelize_module: {} and {} share their memory, but would have placements {} and {}; style both alike, "
        "or give each its own memory (clone)",
        first.paths.front(), tensors_[i].paths.front(), tessera::to_string(placements_of(first)),
        tessera::to_string(placements_of(tensors_[i]))));
  }
}

Placements LayoutPlan::placements_of(const TensorPlan& plan) const {
  Placements placements(static_cast<std::size_t>(mesh_.ndim()), Replicate());
  std::optional<Placement> placement = plan.placement;
  if (!placement && plan.replaced_by && tensors_[*plan.replaced_by].tensor.sizes() == plan.tensor.sizes()) {
    placement = tensors_[*plan.replaced_by].placement;  // so that it is not whole beside what is in use
  }
  if (tensor_dim_) placements[static_cast<std::size_t>(*tensor_dim_)] = placement.value_or(Replicate());
  if (!plan.is_parameter || plan.tensor.dim() == 0) return placements;
  for (const int64_t mesh_dim : sharding_.mesh_dims)
    placements[static_cast<std::size_t>(mesh_dim)] = Shard(0).ordered(1);
  return placements;
}

// A tensor that was a DTensor before may be on another mesh; it stays as it is there.
bool LayoutPlan::is_gathered(const TensorPlan& plan) const {
  const bool here = !is_dtensor(plan.tensor) || mesh_of(plan.tensor) == mesh_;
  return here && plan.is_parameter && plan.tensor.dim() > 0 && !sharding_.mesh_dims.empty();
}

// Returns the tensor's contracts as one chain. A contract that names no operator still says whose gradient is reduced
// and which mesh dimensions are gathered.
ContractPtr LayoutPlan::contract_of(const TensorPlan& plan, const std::shared_ptr<GatherSchedule>& schedule) const {
  ContractPtr chain;
  for (auto contract = plan.contracts.rbegin(); contract != plan.contracts.rend(); ++contract) {
    Contract link = *contract;
    link.next = chain;
    chain = std::make_shared<const Contract>(std::move(link));
  }
  Contract first = chain ? *chain : Contract();
  if (chain == nullptr) first.path = plan.paths.front();
  if (is_gathered(plan)) {
    first.gather_dims = sharding_.mesh_dims;
    first.of_copies = std::make_shared<const Contract>(first);
    first.gather_schedule = schedule;
  }
  return std::make_shared<const Contract>(std::move(first));
}

void LayoutPlan::warn_of_aliases() const {
  std::map<const c10::StorageImpl*, std::size_t> owners;  // how many of the tensors and lists here hold a storage
  for (const TensorPlan& plan : tensors_) {
    if (plan.tensor.has_storage()) ++owners[plan.tensor.storage().unsafeGetStorageImpl()];
  }
  std::vector<std::string> shared;
  for (const TensorPlan& plan : tensors_) {
    const at::Tensor& t = plan.tensor;
    if (is_dtensor(t) || detail::is_deferred(t) || !t.has_storage() || t.numel() == 0) continue;
    const std::size_t known = owners.at(t.storage().unsafeGetStorageImpl()) + (is_listed(t.storage()) ? 1 : 0);
    if (t.storage().use_count() > known) shared.push_back(plan.paths.front());
  }
  if (shared.empty()) return;
  constexpr std::size_t kShown = 3;
  const std::string more = shared.size() > kShown ? fmt::format(" and {} more", shared.size() - kShown) : "";
  shared.resize(std::min(shared.size(), kShown));
  logger().warn(
      "parallelize_module: the memory of {}{} is shared with a tensor that is no parameter or buffer of the module, "
      "such "
      "as a view that is kept as a member, or what it was loaded from: that tensor keeps the old values, and must not "
      "be "
      "used in forward; take a view there",
      fmt::join(shared, ", "), more);
}

void LayoutPlan::run(int64_t src_rank) const {
  const at::NoGradGuard no_grad;
  warn_of_aliases();
  const std::vector<std::size_t> alike = first_alike(tensors_);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& t = tensors_[i].tensor;
    if (is_dtensor(t)) continue;
    if (alike[i] == i && detail::is_deferred(t)) {
      const Placements placements = normalize(placements_of(tensors_[i]), mesh_.mesh(), t.dim(), "parallelize_module");
      detail::materialize(t, intern_spec(mesh_, placements, t.sizes(), t.scalar_type()), tensors_[i].paths.front());
      continue;
    }
    if (alike[i] == i) {
      distribute_in_place(t, mesh_, placements_of(tensors_[i]), src_rank);
      continue;
    }
    // This tensor has the memory of an earlier one, so both share that one's piece.
    const detail::Meta& first = detail::meta(tensors_[alike[i]].tensor);
    const at::Tensor grad = t.grad();
    if (grad.defined()) t.mutable_grad() = at::Tensor();
    detail::convert_in_place(t, first.local(), first.spec);
    detail::meta(t).share_writes_of(first);
    if (!t.is_inference()) t.unsafeGetTensorImpl()->set_version_counter(first.version());
    if (grad.defined()) t.mutable_grad() = distribute_tensor(grad, mesh_, placements_of(tensors_[i]), src_rank);
  }
  const auto schedule = std::make_shared<GatherSchedule>(sharding_.gather);
  for (const TensorPlan& plan : tensors_) {
    if (plan.contracts.empty() && detail::meta(plan.tensor).contract != nullptr) continue;
    detail::meta(plan.tensor).contract = contract_of(plan, schedule);
    detail::watch_gradient(plan.tensor);  // else its first use does it, which two threads may be in at once
    if (is_gathered(plan)) schedule->add(plan.tensor);
  }
  for (const auto& action : actions_) action();
}

std::vector<BucketedParameter> LayoutPlan::parameters_here() const {
  std::vector<BucketedParameter> parameters;
  for (const TensorPlan& plan : tensors_) {
    if (!plan.is_parameter || plan.replaced_by || mesh_of(plan.tensor) != mesh_) continue;
    Placements gradient = without_partial(tessera::placements_of(plan.tensor));
    if (sharding_.whole_gradients && is_gathered(plan)) {
      for (const int64_t mesh_dim : sharding_.mesh_dims) gradient[static_cast<std::size_t>(mesh_dim)] = Replicate();
    }
    parameters.push_back({.parameter = plan.tensor, .gradient = std::move(gradient)});
  }
  return parameters;
}

std::string LayoutPlan::to_string() const {
  std::string text;
  for (const TensorPlan& plan : tensors_) {
    if (!plan.placement && plan.contracts.empty()) continue;
    text += fmt::format("{}  {}  [{}] by {}", fmt::join(plan.paths, " = "),
                        tessera::to_string(plan.placement.value_or(Replicate())), fmt::join(plan.tensor.sizes(), ", "),
                        plan.placed_by);
    for (const Contract& contract : plan.contracts) text += text_of(contract);
    text += "\n";
  }
  return text;
}

}  // namespace tessera

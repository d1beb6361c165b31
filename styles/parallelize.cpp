#include "tessera/styles/parallelize.h"

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/failing.h"
#include "tessera/placement/planner/cost_model.h"
#include "tessera/styles/layout_plan.h"
#include "tessera/styles/module_tree.h"

namespace tessera {
namespace {

// Says whether a parameter is a DTensor on this mesh already, cut.
bool has_part_on(const ModuleTree& tree, const DeviceMesh& mesh) {
  const auto is_part = [&](const NamedTensor& item) {
    return item.is_parameter && is_dtensor(item.tensor) && spec_of(item.tensor).sharded &&
           mesh_of(item.tensor).mesh() == mesh.mesh();
  };
  return std::ranges::any_of(tree, [&](const ModuleNode& node) { return std::ranges::any_of(node.tensors, is_part); });
}

// Returns what `find` returns, and names the option in what it throws.
template <class Find>
auto of_option(const char* option, const Find& find) {
  try {
    return find();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(fmt::format("parallelize_module: options.{}: {}", option, error.what()));
  }
}

// Returns an option's mesh dimensions as indexes.
std::vector<int64_t> normalized(const DeviceMesh& mesh, const MeshDims& given, const char* option) {
  return of_option(option, [&] { return mesh.mesh().normalize(given); });
}

// Prints mesh dimensions as users name them.
std::string names_of(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  std::vector<std::string> names;
  for (const int64_t dim : dims) names.push_back(mesh.mesh().mesh_dim_name(dim));
  return fmt::format("{}", fmt::join(names, ", "));
}

// Returns the mesh dimension that styles cut over; nullopt where all mesh dimensions split the batch.
std::optional<int64_t> tensor_dim_of(const DeviceMesh& mesh, const ModuleTree& tree, const ParallelPlan& plan,
                                     const ParallelizeOptions& options) {
  if (options.tensor_dim) {
    return of_option("tensor_dim", [&] { return mesh.mesh().index_of(*options.tensor_dim); });
  }
  if (options.data_dims && std::ssize(normalized(mesh, *options.data_dims, "data_dims")) == mesh.ndim()) {
    return std::nullopt;
  }
  const std::vector<std::string>& names = mesh.mesh().names();
  const auto tp = std::find(names.begin(), names.end(), "tp");
  if (tp != names.end()) return tp - names.begin();
  if (mesh.ndim() > 1) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: the mesh {} has {} dimensions and none called tp; give options.tensor_dim, or "
                    "list all of them in options.data_dims",
                    mesh.mesh().to_string(), mesh.ndim()));
  }
  // Where no style cuts anything, a mesh such as {dp: 4} says that its ranks have different parts of the batch.
  // Where layers of the module are on it already, it is theirs.
  if (plan.empty() && !names.empty() && !options.data_dims && !has_part_on(tree, mesh)) return std::nullopt;
  return 0;
}

std::vector<int64_t> data_dims_of(const DeviceMesh& mesh, const ParallelizeOptions& options,
                                  std::optional<int64_t> tensor_dim) {
  if (!options.data_dims) {
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      if (dim != tensor_dim) dims.push_back(dim);
    }
    return dims;
  }
  std::vector<int64_t> dims = normalized(mesh, *options.data_dims, "data_dims");
  if (tensor_dim && std::ranges::count(dims, *tensor_dim) > 0) {
    throw std::invalid_argument(fmt::format(
        "parallelize_module: data_dims [{}] name mesh dimension {}, which is the tensor dimension; name each dimension "
        "of {} once, for tensors or for data",
        names_of(mesh, dims), mesh.mesh().mesh_dim_name(*tensor_dim), mesh.mesh().to_string()));
  }
  return dims;
}

// Without data_placement parameters are whole on the data dimensions, and these two options would change nothing.
void check_unsharded(const DeviceMesh& mesh, const ParallelizeOptions& options) {
  const bool staged = options.zero_stage != ParallelizeOptions().zero_stage;
  if (!staged && !options.shard_dims) return;
  throw std::invalid_argument(fmt::format(
      "parallelize_module: {} without data_placement, which says that parameters are sharded over the data "
      "dimensions; give data_placement = Shard(0) too, or leave it out",
      staged ? fmt::format("zero_stage {}", options.zero_stage)
             : fmt::format("shard_dims [{}]", names_of(mesh, normalized(mesh, *options.shard_dims, "shard_dims")))));
}

// Returns the mesh dimensions over which parameters are sharded to save memory: none without data_placement, else all
// data dimensions or those of them that the options list.
std::vector<int64_t> shard_dims_of(const DeviceMesh& mesh, const ParallelizeOptions& options,
                                   const std::vector<int64_t>& data_dims) {
  if (!options.data_placement || options.data_placement->is_replicate()) {
    check_unsharded(mesh, options);
    return {};
  }
  if (*options.data_placement != Shard(0)) {
    throw std::invalid_argument(fmt::format("parallelize_module: data_placement {}; give Shard(0), or Replicate()",
                                            tessera::to_string(*options.data_placement)));
  }
  if (data_dims.empty()) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: data_placement is given for the mesh {}, which has no data dimension; list "
                    "the mesh dimensions that split the batch in options.data_dims, or leave data_placement out",
                    mesh.mesh().to_string()));
  }
  if (!options.shard_dims) return data_dims;
  std::vector<int64_t> dims = normalized(mesh, *options.shard_dims, "shard_dims");
  if (!std::ranges::all_of(dims, [&](int64_t dim) { return std::ranges::count(data_dims, dim) > 0; })) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: shard_dims [{}] of {}; name each once, out of the data dimensions [{}]",
                    names_of(mesh, dims), mesh.mesh().to_string(), names_of(mesh, data_dims)));
  }
  return dims;
}

void check_numbers(const ParallelizeOptions& options, int64_t mesh_ndim) {
  if (options.compute_dtype && *options.compute_dtype != at::kBFloat16 && *options.compute_dtype != at::kHalf) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: compute_dtype {}; give bfloat16 or float16, or convert "
                    "the module to another dtype before",
                    c10::toString(*options.compute_dtype)));
  }
  detail::check_bucket_options(options.gradient_buckets, mesh_ndim, "parallelize_module");
  if (options.gather_ahead_bytes < 0) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: gather_ahead_bytes {}; give 0 or more", options.gather_ahead_bytes));
  }
  if (options.zero_stage < 1 || options.zero_stage > 3) {
    throw std::invalid_argument(fmt::format("parallelize_module: zero_stage {}; give 1, 2 or 3", options.zero_stage));
  }
}

LayoutPlan::DataSharding data_sharding_of(const ParallelizeOptions& options, const std::vector<int64_t>& shard_dims) {
  return {.mesh_dims = shard_dims,
          .gather = {.ahead_bytes = options.gather_ahead_bytes, .keeps = options.zero_stage < 3},
          .whole_gradients = options.zero_stage == 1};
}

void check_source(const DeviceMesh& mesh, int64_t src_rank) {
  if (src_rank == kMeshFirstRank || src_rank == kNoSource || mesh.mesh().coordinate_of(src_rank)) return;
  throw std::invalid_argument(
      fmt::format("parallelize_module: src_rank {} is not on the mesh {}; give one of its ranks, or kNoSource for each "
                  "rank's own values",
                  src_rank, mesh.mesh().to_string()));
}

void check_optimizers(const LayoutPlan& plan, const ParallelizeOptions& options) {
  for (const torch::optim::Optimizer* optimizer : options.optimizers) {
    if (optimizer == nullptr)
      throw std::invalid_argument("parallelize_module: options.optimizers holds a null pointer; leave it out");
    for (const TensorPlan& tensor : plan.tensors()) {
      if (is_dtensor(tensor.tensor)) continue;  // it keeps its layout
      if (optimizer->state().find(tensor.tensor.unsafeGetTensorImpl()) == optimizer->state().end()) continue;
      throw std::invalid_argument(fmt::format(
          "parallelize_module: an optimizer holds state for {}, laid out as the parameter is now; parallelize the "
          "module first, then make the optimizer; to continue from a checkpoint, load its state with load_optimizer",
          tensor.paths.front()));
    }
  }
}

// LibTorch's kernel for such a gradient does not take a DTensor, so that backward would fail. Without gradient mode the
// module is taken to be for inference.
void check_embeddings(const ModuleTree& tree) {
  for (const ModuleNode& node : tree) {
    const bool trained =
        std::ranges::any_of(node.tensors, [](const NamedTensor& item) { return item.tensor.requires_grad(); });
    if (!node.sparse_gradient || !trained || !at::GradMode::is_enabled()) continue;
    throw std::invalid_argument(fmt::format(
        "parallelize_module: {} has sparse(true), and a DTensor cannot have a sparse "
        "gradient; give sparse(false), set requires_grad of its weight to false, or, where the module is only "
        "for inference, call parallelize_module under NoGradGuard",
        shown_path(node.path)));
  }
}

// Says whether `part` has some ranks of a group along `dim` and lacks others. It is the same on every rank.
bool cuts_groups(const Mesh& part, const Mesh& mesh, int64_t dim) {
  std::map<std::vector<int64_t>, bool> has;  // for each group, by its coordinate on the other dimensions
  for (const int64_t rank : mesh.ranks()) {
    std::vector<int64_t> group = *mesh.coordinate_of(rank);
    group[static_cast<std::size_t>(dim)] = 0;
    const bool here = part.coordinate_of(rank).has_value();
    if (has.try_emplace(group, here).first->second != here) return true;
  }
  return false;
}

// A parameter may be a DTensor already, on another mesh, such as that of a layer on mesh["tp"]. Its gradient is then
// reduced over that mesh alone.
void check_meshes(const LayoutPlan& plan, const DeviceMesh& mesh, const std::vector<int64_t>& data_dims) {
  for (const TensorPlan& each : plan.tensors()) {
    if (!each.is_parameter || !each.tensor.requires_grad() || !is_dtensor(each.tensor)) continue;
    const Mesh& its = mesh_of(each.tensor).mesh();
    if (its == mesh.mesh()) continue;
    for (const int64_t dim : data_dims) {
      if (!cuts_groups(its, mesh.mesh(), dim)) continue;
      throw std::invalid_argument(fmt::format(
          "parallelize_module: the parameter {} is a DTensor on the mesh {}, which lacks ranks along {} of {}: its "
          "gradient would not be reduced over them. Let the plan give a style to a plain module in its place; or set "
          "requires_grad after this call, and reduce the gradient yourself",
          each.paths.front(), its.to_string(), mesh.mesh_dim_name(dim), mesh.mesh().to_string()));
    }
  }
}

std::string child_names(const ModuleTree& tree) {
  std::vector<std::string> names;
  for (const auto& [name, index] : tree.front().children) names.push_back(name);
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

// Holds the styles of one module, in the order of the plan. A module with two names has one Assigned, under its first
// name.
struct Assigned {
  std::size_t node;
  std::vector<const ParallelPlan::value_type*> entries;
};

void add_entry(Assigned& assigned, const ModuleNode& node, const ParallelPlan::value_type& entry) {
  for (const auto* other : assigned.entries) {
    if (other == &entry) return;
    const bool joins = other->second->joins_others() || entry.second->joins_others();
    if (joins && other->second->name() != entry.second->name()) continue;
    throw std::invalid_argument(fmt::format(
        "parallelize_module: two styles for {}: '{}' gives {} and '{}' gives {}; let one pattern match it. A Prepare "
        "style may be beside another style, but not beside one of its own kind",
        shown_path(node.path), other->first, other->second->to_string(), entry.first, entry.second->to_string()));
  }
  assigned.entries.push_back(&entry);
}

std::vector<Assigned> assign(const ModuleTree& tree, const ParallelPlan& plan, bool allow_unmatched) {
  std::map<std::size_t, Assigned> by_node;
  std::map<const void*, std::size_t> first_name;
  for (std::size_t i = 0; i < tree.size(); ++i) first_name.emplace(tree[i].identity, i);
  for (const auto& entry : plan) {
    const std::vector<std::size_t> found = match(tree, entry.first);
    if (found.empty() && !allow_unmatched) {
      throw std::invalid_argument(fmt::format(
          "parallelize_module: the pattern '{}' ({}) matches no module; each dotted part is matched against the names "
          "of direct children, and the root's are: {}. Set options.allow_unmatched if a pattern may match nothing",
          entry.first, entry.second->name(), child_names(tree)));
    }
    for (const std::size_t index : found) {
      const std::size_t node = first_name.at(tree[index].identity);
      add_entry(by_node.try_emplace(node, Assigned{node, {}}).first->second, tree[node], entry);
    }
  }
  std::vector<Assigned> assigned;
  for (auto& [node, value] : by_node) assigned.push_back(std::move(value));
  return assigned;
}

// Holds what parallelize_module is about to do to a module.
struct Planned {
  ModuleTree tree;
  ParallelPlan plan;
  std::optional<LayoutPlan> layout;
  std::optional<int64_t> tensor_dim;
  std::vector<int64_t> data_dims;
  std::vector<int64_t> shard_dims;
};

// Returns all that must be the same on every rank: which tensors will be communicated, and the plan that says how.
std::string fingerprint_of(const Planned& planned, const ParallelizeOptions& options) {
  // The text of a style may leave options out, and a style may read a module's own, such as an attention's number of
  // heads: what they ask for is in the text of the layout.
  std::string all = fmt::format(
      "{}\n{}\n{} {} {} {} {} {} [{}] {} {} {} {} {}\n", to_string(planned.plan), planned.layout->to_string(),
      options.src_rank, planned.tensor_dim.value_or(-1), fmt::join(planned.data_dims, ","),
      to_string(options.data_placement.value_or(Replicate())), options.gradient_buckets.bucket_bytes,
      c10::toString(options.gradient_buckets.dtype.value_or(at::ScalarType::Undefined)),
      options.gradient_buckets.cost_model.to_string(), options.zero_stage, fmt::join(planned.shard_dims, ","),
      options.gather_ahead_bytes, c10::toString(options.compute_dtype.value_or(at::ScalarType::Undefined)),
      options.allow_plain);
  std::map<const void*, std::size_t> first, first_memory;
  for (const ModuleNode& node : planned.tree) {
    all += fmt::format("{} {}\n", node.path, node.type);
    for (const NamedTensor& item : node.tensors) {
      const at::Tensor& t = item.tensor;
      const auto tied = first.emplace(t.unsafeGetTensorImpl(), first.size()).first->second;
      const void* const memory = t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
      const auto shared = first_memory.emplace(memory, first_memory.size()).first->second;
      all += fmt::format("{} [{}] {} {} {} {} {} {} {}\n", item.name, fmt::join(t.sizes(), ","),
                         c10::toString(t.scalar_type()), t.requires_grad(), t.is_leaf() && t.grad().defined(), tied,
                         shared, memory == nullptr ? 0 : t.storage_offset(), is_dtensor(t));
    }
  }
  return all;
}

// Applies the styles and checks what they asked for; changes nothing.
void make_plan(Planned& planned, const detail::Subject& subject, const DeviceMesh& mesh,
               const ParallelizeOptions& options) {
  planned.tree = subject.tree();
  planned.plan = subject.plan();
  planned.tensor_dim = tensor_dim_of(mesh, planned.tree, planned.plan, options);
  planned.data_dims = data_dims_of(mesh, options, planned.tensor_dim);
  check_source(mesh, options.src_rank);
  check_numbers(options, mesh.ndim());
  check_embeddings(planned.tree);
  planned.shard_dims = shard_dims_of(mesh, options, planned.data_dims);
  LayoutPlan& layout = planned.layout.emplace(mesh, planned.tensor_dim, planned.tree);
  layout.shard_over_data(data_sharding_of(options, planned.shard_dims));
  check_meshes(layout, mesh, planned.data_dims);
  for (const Assigned& assigned : assign(planned.tree, planned.plan, options.allow_unmatched)) {
    for (const auto* entry : assigned.entries) {
      const std::string name = entry->second->name();
      ApplyContext context(planned.tree, assigned.node, name, layout, planned.tensor_dim, planned.data_dims);
      entry->second->apply(context);
    }
  }
  layout.check();
  check_optimizers(layout, options);
}

}  // namespace

detail::Calling detail::parallelize(torch::nn::Module* root, const MakePlan& plan, const DeviceMesh& mesh,
                                    const ParallelizeOptions& options) {
  const auto tree = [root] {
    if (root == nullptr) throw std::invalid_argument("parallelize_module: the module is a null pointer; make it first");
    return tree_of(*root);
  };
  return parallelize(Subject{.tree = tree, .plan = [&] { return plan(*root); }}, mesh, options);
}

detail::Calling detail::parallelize(const Subject& subject, const DeviceMesh& mesh, const ParallelizeOptions& options) {
  const detail::NotDeferred own_tensors;
  Planned planned;
  if (options.src_rank == kNoSource) {
    failing_unless_refused(mesh.world(), "parallelize_module", [&] { make_plan(planned, subject, mesh, options); });
  } else {
    Agreement({mesh}, "parallelize_module")
        .run([&] { make_plan(planned, subject, mesh, options); }, [&] { return fingerprint_of(planned, options); },
             "the ranks' modules or plans differ; every rank must give a module of the same parameters and buffers "
             "(names, shapes, dtypes, requires_grad, which have gradients, which share memory), and the same plan and "
             "options, whose styles ask for the same layouts");
  }
  logger().debug("parallelize_module on {}:\n{}", mesh.to_string(), planned.layout->to_string());
  planned.layout->run(options.src_rank);
  bucket_gradients(planned.layout->parameters_here(), planned.data_dims, options.gradient_buckets);
  // The loop runs backwards, so that a module with two names keeps its first.
  for (auto node = planned.tree.rbegin(); node != planned.tree.rend(); ++node) {
    auto* const hookable = dynamic_cast<Hookable*>(node->module);
    if (hookable != nullptr) hookable->set_place(shown_path(node->path), mesh.world_ptr());
  }
  const auto splits = [&](int64_t dim) { return mesh.size(dim) > 1; };
  const bool checks = !options.allow_plain && std::ranges::any_of(planned.data_dims, splits);
  return {.compute = {.device = mesh.device().type(), .dtype = options.compute_dtype},
          .split_mesh = checks ? mesh.mesh().to_string() : ""};
}

}  // namespace tessera

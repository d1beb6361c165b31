#include "tessera/layers/pairwise.h"

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/module_tree.h"
#include "tessera/styles/parallel_styles.h"

namespace tessera {
namespace {

// Returns the direct children that are Linear, by their index in the tree.
std::vector<std::size_t> linears(const ModuleTree& tree, const ModuleNode& node) {
  std::vector<std::size_t> out;
  std::set<const void*> seen;  // a layer registered under two names counts once
  for (const auto& [name, child] : node.children) {
    if (tree[child].kind == ModuleKind::kLinear && seen.insert(tree[child].identity).second) out.push_back(child);
  }
  return out;
}

// Says what to apply to each module that holds pairs.
struct Wanted {
  bool sequence;
  PrepareFunction input;
  PrepareFunction output;
};

void add_pairs(const ModuleTree& tree, std::size_t node, const Wanted& wanted, std::set<const void*>& seen,
               ParallelPlan& plan) {
  if (!seen.insert(tree[node].identity).second) return;  // already visited under its other name
  const std::vector<std::size_t> layers = linears(tree, tree[node]);
  if (layers.size() < 2) {
    for (const auto& [name, child] : tree[node].children) add_pairs(tree, child, wanted, seen, plan);
    return;
  }
  if (wanted.input || wanted.output)
    plan.emplace_back(pattern_of(tree[node].path), Prepared(wanted.input, wanted.output));
  const std::size_t paired = layers.size() - layers.size() % 2;
  for (std::size_t i = 0; i < paired; i += 2) {
    StyleLayouts up, down;
    if (wanted.sequence && i == 0) up = {.input_layouts = Shard(0), .desired_input_layouts = Replicate()};
    const bool is_last = i + 2 == layers.size();  // otherwise a whole layer follows
    if (is_last)
      down = {.output_layouts = wanted.sequence ? Shard(0) : Replicate(), .use_local_output = !wanted.output};
    plan.emplace_back(pattern_of(tree[layers[i]].path), ColwiseParallel(up));
    plan.emplace_back(pattern_of(tree[layers[i + 1]].path), RowwiseParallel(down));
  }
}

DeviceMesh mesh_for(const at::Tensor& t, const MaybeMesh& given, const char* what) {
  if (!given && !is_dtensor(t))
    throw std::invalid_argument("device_mesh is not passed nor can be inferred: give a mesh");
  const DeviceMesh mesh = given ? *given : mesh_of(t);
  if (mesh.ndim() != 1) {
    throw std::invalid_argument(fmt::format("device_mesh has dims {} but expected to be 1 for {}: give one of {}",
                                            mesh.ndim(), what, mesh.to_string()));
  }
  if (is_dtensor(t) && !(mesh_of(t) == mesh)) {
    throw std::invalid_argument(
        fmt::format("the {} is on mesh {}, but {} was given: redistribute it with redistribute_to", what,
                    mesh_of(t).to_string(), mesh.to_string()));
  }
  return mesh;
}

at::Tensor input_as(const at::Tensor& input, const MaybeMesh& given, const Placement& placement) {
  if (!input.defined()) {
    throw std::invalid_argument(
        "Tensor parallel module expects torch.Tensor or DTensor input but received an undefined one");
  }
  const DeviceMesh mesh = mesh_for(input, given, "input");
  return is_dtensor(input) ? redistribute(input, {placement}) : from_local(input, mesh, {placement});
}

const at::Tensor& checked_output(const at::Tensor& output, const MaybeMesh& given) {
  if (!output.defined() || !is_dtensor(output)) {
    throw std::invalid_argument(fmt::format("Expect output of Tensor Parallel to be a DTensor, but found {}",
                                            output.defined() ? "a plain tensor" : "an undefined one"));
  }
  mesh_for(output, given, "output");
  return output;
}

}  // namespace

ParallelPlan PairwiseParallel::plan(torch::nn::Module& module) const {
  const ModuleTree tree = tree_of(module);
  ParallelPlan plan;
  std::set<const void*> seen;
  add_pairs(tree, 0, {.sequence = sequence_, .input = input_, .output = output_}, seen, plan);
  if (!plan.empty()) return plan;
  throw std::invalid_argument(
      fmt::format("PairwiseParallel: more than one Linear is needed for an MLP, as direct children of one module; {} "
                  "contains no such module",
                  tree[0].type));
}

void Prepared::apply(ApplyContext& context) const {
  if (style_) (*style_)->apply(context);
  const auto prepare_first = [mesh = context.mesh()](const PrepareFunction& function,
                                                     std::vector<at::Tensor>& tensors) {
    if (!tensors.empty() && tensors[0].defined()) tensors[0] = function(tensors[0], mesh);
  };
  if (input_) {
    context.forward_pre_hook(
        [=, function = input_](std::vector<at::Tensor>& inputs) { prepare_first(function, inputs); },
        /*throws_alike=*/true);
  }
  if (output_) {
    context.forward_hook(
        [=, function = output_](const std::vector<at::Tensor>& /*inputs*/, std::vector<at::Tensor>& outputs) {
          prepare_first(function, outputs);
        },
        /*throws_alike=*/true);
  }
}

std::string Prepared::to_string() const {
  return fmt::format("{}, prepared {}", style_ ? (*style_)->to_string() : "Prepared",
                     input_ && output_ ? "before and after"
                     : input_          ? "before"
                     : output_         ? "after"
                                       : "by nothing");
}

at::Tensor make_input_shard_1d(const at::Tensor& input, const MaybeMesh& mesh, int64_t dim) {
  return input_as(input, mesh, Shard(dim));
}

at::Tensor make_input_shard_1d_last_dim(const at::Tensor& input, const MaybeMesh& mesh) {
  return input_as(input, mesh, Shard(input.defined() ? input.dim() - 1 : 0));
}

at::Tensor make_input_replicate_1d(const at::Tensor& input, const MaybeMesh& mesh) {
  return input_as(input, mesh, Replicate());
}

at::Tensor make_input_reshard_replicate(const at::Tensor& input, const MaybeMesh& mesh) {
  // A DTensor goes there at once, whatever its layout is.
  if (is_dtensor(input)) return input_as(input, mesh, Replicate());
  return redistribute(input_as(input, mesh, Shard(0)), {Replicate()});
}

at::Tensor make_output_shard_1d(const at::Tensor& output, const MaybeMesh& mesh, int64_t dim) {
  return redistribute(checked_output(output, mesh), {Shard(dim)});
}

at::Tensor make_output_replicate_1d(const at::Tensor& output, const MaybeMesh& mesh) {
  return redistribute(checked_output(output, mesh), {Replicate()});
}

at::Tensor make_output_tensor(const at::Tensor& output, const MaybeMesh& mesh) {
  return to_local(make_output_replicate_1d(output, mesh));
}

at::Tensor make_output_reshard_tensor(const at::Tensor& output, const MaybeMesh& mesh) {
  return to_local(make_output_shard_1d(output, mesh));
}

at::Tensor make_sharded_output_tensor(const at::Tensor& output, const MaybeMesh& mesh) {
  if (spec_of(checked_output(output, mesh)).partial) {
    throw std::invalid_argument(
        fmt::format("make_sharded_output_tensor: {} is a pending reduction; redistribute it first", to_string(output)));
  }
  return to_local(output);
}

}  // namespace tessera

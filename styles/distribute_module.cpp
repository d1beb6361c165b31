#include "tessera/styles/distribute_module.h"

#include <set>
#include <stdexcept>

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/styles/layout_plan.h"
#include "tessera/styles/module_tree.h"

namespace tessera {
namespace {

// Returns the module as a Hookable where the options need hooks, else nullptr.
Hookable* hooks_for(torch::nn::Module& module, const DistributeModuleOptions& options) {
  auto* const hookable = dynamic_cast<Hookable*>(&module);
  if (hookable == nullptr && (options.input_fn || options.output_fn)) {
    throw std::invalid_argument(fmt::format(
        "distribute_module: input_fn and output_fn wrap forward, and a {} cannot be hooked; declare the class with "
        "TESSERA_MODULE(Name) of tessera/styles/hooks.h in the place of TORCH_MODULE(Name)",
        module.name()));
  }
  return hookable;
}

}  // namespace

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PartitionFn& partition_fn,
                       const DistributeModuleOptions& options) {
  const detail::NotDeferred own_tensors;
  Hookable* const hookable = hooks_for(module, options);
  const ModuleTree tree = tree_of(module);
  LayoutPlan(mesh, 0, tree).check();
  if (partition_fn) {
    std::set<const void*> seen;  // a module may have several names
    for (const ModuleNode& node : tree) {
      if (!seen.insert(node.identity).second) continue;
      mesh.world().guard(fmt::format("partition_fn of {}", shown_path(node.path)),
                         [&] { partition_fn(node.path, *node.module, mesh); });
    }
  }
  LayoutPlan rest(mesh, 0, tree_of(module));
  rest.check();
  rest.run(options.src_rank);
  if (hookable == nullptr) return;
  hookable->set_place("the root module", mesh.world_ptr());
  if (options.input_fn) hookable->register_forward_pre_hook(options.input_fn);
  if (options.output_fn) hookable->register_forward_hook(options.output_fn);
}

}  // namespace tessera

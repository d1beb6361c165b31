#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/module_tree.h"

namespace tessera {

// Says what parallelize_module will do to one tensor: set its placement on the tensor dimension, and its contracts. A
// tied tensor has several paths.
struct TensorPlan {
  at::Tensor tensor;
  bool is_parameter = true;            // false: a buffer
  std::vector<std::string> paths;      // such as "layers.0.attn.wq.weight"; messages use the first
  std::optional<Placement> placement;  // nullopt: no style named it, so it is replicated
  std::string placed_by;               // the path and style that set `placement`
  std::vector<Contract> contracts;
  // Is the entry of the tensor that a caller has assigned to a member in the place of this registered parameter, which
  // nothing uses then; nullopt if it is registered by another name too. See ModuleNode::tensors.
  std::optional<std::size_t> replaced_by;
};

// Collects everything that the styles of one parallelize_module call ask for, so that all of it is checked before the
// first tensor is converted. It does not communicate, and every rank computes the same.
//
// Invariants:
//   - tensors() has one entry per different TensorImpl, in the order of the tree; a tied tensor has one entry.
//   - the placement of an entry is Replicate or a Shard of one of the tensor's dimensions, never Partial.
//   - no operator is named by two contracts of one entry.
class LayoutPlan {
 public:
  // Without a `tensor_dim` no placement may be a Shard, and there may be no contract.
  LayoutPlan(DeviceMesh mesh, std::optional<int64_t> tensor_dim, const ModuleTree& tree);

  // Says how parameters are sharded over mesh dimensions that split the batch, if there are any in `mesh_dims`: along
  // dimension 0, after the tensor dimension's shard. They are gathered for operators that use them, as `gather` says.
  // With whole_gradients their gradients are not sharded there. Contracts get all of it.
  struct DataSharding {
    std::vector<int64_t> mesh_dims;
    GatherScheduleOptions gather;
    bool whole_gradients = false;
  };
  void shard_over_data(DataSharding sharding) { sharding_ = std::move(sharding); }

  const DeviceMesh& mesh() const { return mesh_; }
  const std::vector<TensorPlan>& tensors() const { return tensors_; }

  // `by` is "a.b (ColwiseParallel)". Throws std::invalid_argument when another style has placed the tensor differently,
  // when it is a DTensor already, or when `placement` shards a dimension that the tensor does not have.
  void place(const at::Tensor& tensor, const Placement& placement, const std::string& by);
  // Throws std::invalid_argument when an operator of the contract reads no contracts, or when another contract on the
  // tensor has different layouts for the same operator; the text names both paths.
  void add_contract(const at::Tensor& tensor, const Contract& contract);
  // `run` calls the actions last.
  void at_end(std::function<void()> action) { actions_.push_back(std::move(action)); }

  // Throws std::invalid_argument when a tensor cannot be converted: it is no leaf, is not dense, is on the meta device,
  // or shares memory with another in a way that conversion would break; when a partition does not cut its tensor, as
  // check_layout says, naming the path and the style; or when parameters are to be gathered and one has a contract with
  // a plain result.
  void check() const;
  // Converts the parameters and buffers in the order of the tree, then sets the contracts, then calls the actions.
  void run(int64_t src_rank) const;
  // Returns the parameters in use that are on mesh() after `run`, with the layouts of their gradients.
  std::vector<BucketedParameter> parameters_here() const;

  // Prints one line per tensor that a style named, with its contracts:
  // "a.b.weight  S(0)  [8, 4] by a.b (ColwiseParallel), matmul addmm: R -> R, output S(-1)".
  std::string to_string() const;

 private:
  std::size_t add(const std::string& path, const NamedTensor& item);
  TensorPlan& plan_of(const at::Tensor& tensor, const std::string& by);
  Placements placements_of(const TensorPlan& plan) const;
  bool is_gathered(const TensorPlan& plan) const;
  // Warns where other tensors share a parameter's memory: they would keep the values that it has now.
  void warn_of_aliases() const;
  ContractPtr contract_of(const TensorPlan& plan, const std::shared_ptr<GatherSchedule>& schedule) const;

  DeviceMesh mesh_;
  std::optional<int64_t> tensor_dim_;
  DataSharding sharding_;
  std::vector<TensorPlan> tensors_;
  std::map<const void*, std::size_t> index_;
  std::vector<std::function<void()>> actions_;
};

}  // namespace tessera

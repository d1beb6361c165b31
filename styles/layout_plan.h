#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/module_tree.h"

namespace tessera {

// What is to become of one tensor of a module: where it lies on the tensor dimension, and the contracts left on it. A
// tied tensor has several paths.
struct TensorPlan {
  at::Tensor tensor;
  bool is_parameter = true;            // else a buffer
  std::vector<std::string> paths;      // "layers.0.attn.wq.weight", the first is the one that messages use
  std::optional<Placement> placement;  // none: no style named it, so it is replicated
  std::string placed_by;               // the path and style that did
  std::vector<Contract> contracts;
};

// Everything that parallelize_module is about to do, collected by the styles and checked before the first of it is
// done. No communication; the same on every rank.
class LayoutPlan {
 public:
  LayoutPlan(DeviceMesh mesh, int64_t tensor_dim, const ModuleTree& tree);

  // From now on parameters are cut along dimension 0 on these mesh dimensions too, behind the tensor dimension's cut,
  // and gathered for each operator that uses them: ZeRO-3.
  void cut_over(const std::vector<int64_t>& data_dims) { cut_over_ = data_dims; }

  const DeviceMesh& mesh() const { return mesh_; }
  const std::vector<TensorPlan>& tensors() const { return tensors_; }

  // `by` is "a.b (ColwiseParallel)". Throws std::invalid_argument when another style has placed the tensor elsewhere,
  // it is a DTensor already, or `placement` cuts a dimension that it lacks.
  void place(const at::Tensor& tensor, const Placement& placement, const std::string& by);
  // Throws std::invalid_argument when one of its operators reads no contracts, or another contract on the tensor says
  // otherwise for one of them, naming both paths.
  void add_contract(const at::Tensor& tensor, const Contract& contract);
  // Done after everything else.
  void at_end(std::function<void()> action) { actions_.push_back(std::move(action)); }

  // Throws std::invalid_argument when a tensor cannot be converted: not a leaf, not dense, on the meta device, or
  // sharing memory with another in a way that would come apart; or when parameters are to be gathered, and one has a
  // contract with a plain result.
  void check() const;
  // Converts, in the order of the tree: parameters and buffers, then the contracts, then the actions.
  void run(int64_t src_rank) const;

  // One line a tensor that a style named: "a.b.weight  S(0)  [8, 4] by a.b (ColwiseParallel)".
  std::string to_string() const;

 private:
  TensorPlan& plan_of(const at::Tensor& tensor, const std::string& by);
  Placements placements_of(const TensorPlan& plan) const;
  ContractPtr contract_of(const TensorPlan& plan) const;

  DeviceMesh mesh_;
  int64_t tensor_dim_;
  std::vector<int64_t> cut_over_;
  std::vector<TensorPlan> tensors_;
  std::map<const void*, std::size_t> index_;
  std::vector<std::function<void()>> actions_;
};

}  // namespace tessera

#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/styles/hookable.h"
#include "tessera/styles/module_tree.h"

namespace tessera {

class LayoutPlan;

// Holds the layouts that a style's contract sets, on the tensor dimension; see Contract in dtensor/core/contract.h.
struct ContractLayouts {
  // Lists base names of the ATen operators whose activations and results the contract lays out. Operators that read
  // contracts are matmul and addmm (linear calls one of them), embedding, layer_norm, rms_norm, group_norm and conv2d;
  // and add, which adds a bias to the plain result of a contract with use_local_output.
  // An operator looks at the contract of one argument alone, and the tensor, or a view of it, must be that one: the
  // second factor of matmul and addmm (a Linear's weight), the weight of embedding, of conv2d and of the norms, and the
  // second operand of add (`other`). A contract on another argument, such as a norm's bias, lays out nothing.
  std::vector<std::string> operators;
  Placement input;                  // the layout of a plain activation
  Placement desired;                // the activation is redistributed to this
  std::optional<Placement> output;  // the result is redistributed to this; nullopt: as the operator left it
  bool use_local_output = false;
  bool gather_input_again = false;  // for matmul: see Contract
};

// Describes one module to a style and collects what the style asks for. Nothing is converted or communicated before
// every style of the plan has been applied and everything asked for was found possible.
class ApplyContext {
 public:
  ApplyContext(const ModuleTree& tree, std::size_t node, const std::string& style, LayoutPlan& plan,
               std::optional<int64_t> tensor_dim, const std::vector<int64_t>& data_dims)
      : tree_(tree), node_(tree.at(node)), style_(style), plan_(plan), tensor_dim_(tensor_dim), data_dims_(data_dims) {}

  // These return the module, its path from the root ("" is the root), its type, such as "torch::nn::LinearImpl", and
  // its kind. module() throws std::invalid_argument for a TorchScript module, which is no torch::nn::Module.
  torch::nn::Module& module() const;
  const std::string& path() const { return node_.path; }
  const std::string& type() const { return node_.type; }
  ModuleKind kind() const { return node_.kind; }
  // Returns the module's own parameters and buffers that are defined.
  const std::vector<NamedTensor>& tensors() const { return node_.tensors; }
  // Says whether there is a tensor of that name. "out_proj.bias" is the bias of the child out_proj; `place` and
  // `contract` take such names too.
  bool has(const std::string& name) const;
  bool has_children() const { return !node_.children.empty(); }
  // Says whether the module is an embedding that rewrites rows in forward (max_norm).
  bool renormalizes() const { return node_.renormalizes; }
  // These two are for an attention. num_heads throws std::invalid_argument for a traced module whose code does not give
  // the number of heads.
  int64_t embed_dim() const { return node_.embed_dim; }
  int64_t num_heads() const;

  // These return the whole mesh, the mesh dimension that styles shard over, and those that split the batch. Where all
  // of them do that, tensor_dim() throws std::invalid_argument.
  const DeviceMesh& mesh() const;
  int64_t tensor_dim() const;
  const std::vector<int64_t>& data_dims() const { return data_dims_; }
  // Returns those of data_dims() along which there are several ranks: a plain tensor may be any part of the batch
  // there.
  std::vector<int64_t> dims_of_parts() const;

  // Lays out the module's own parameter or buffer `name` as `placement` on the tensor dimension and Replicate on every
  // other. A tensor that no style places is replicated.
  // Throws std::invalid_argument when there is no tensor of that name, when another style has placed the same (tied)
  // tensor differently, or on a Shard where tensor_dim() throws.
  void place(const std::string& name, const Placement& placement);
  // Sets a contract on the tensor: in the operators that it names, a plain activation is this rank's piece, laid out as
  // `input`. Every other operator refuses, in forward, a plain tensor together with the parameter or a view of it,
  // unless `input` is Replicate.
  // Throws std::invalid_argument when an operator reads no contracts, when another style of a tied tensor gives
  // different layouts for the same operator, or where tensor_dim() throws.
  void contract(const std::string& name, const ContractLayouts& layouts);

  // These add a hook that runs at every forward of the module. An exception in it fails the job (World::guard), unless
  // `throws_alike` says that it occurs on every rank or on none.
  // Throws std::invalid_argument, naming the remedy, when the module is no TESSERA_MODULE.
  void forward_pre_hook(Hookable::PreHook hook, bool throws_alike = false);
  void forward_hook(Hookable::Hook hook, bool throws_alike = false);

  // Throws the std::invalid_argument of a style that does not know this module; `knows` lists the modules that it does
  // know.
  [[noreturn]] void unknown_module(const std::string& knows) const;

 private:
  const NamedTensor* find(const std::string& name) const;
  const NamedTensor& tensor(const std::string& name) const;
  Hookable& hookable() const;
  std::string by() const;  // "a.b (ColwiseParallel)"

  const ModuleTree& tree_;
  const ModuleNode& node_;
  const std::string& style_;
  LayoutPlan& plan_;
  std::optional<int64_t> tensor_dim_;
  const std::vector<int64_t>& data_dims_;
};

// Says how one module is parallelized. Derive from it to write a style:
//   class BilinearByOutput : public ParallelStyle {
//     void apply(ApplyContext& context) const override { context.place("weight", Shard(0)); ... }
//     std::string name() const override { return "BilinearByOutput"; }
//   };
// `apply` must do the same on every rank, and throws std::invalid_argument where it cannot be applied;
// parallelize_module throws that, and any other exception, on every rank.
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  virtual void apply(ApplyContext& context) const = 0;
  // Returns a name for messages, such as "ColwiseParallel".
  virtual std::string name() const = 0;
  // Returns the name with the options that are set, such as "ColwiseParallel(input S(1), output R)"; it is printed with
  // the plan.
  virtual std::string to_string() const { return name(); }
  // Says whether a module may have this style beside another one. The Prepare styles may: they only wrap forward.
  virtual bool joins_others() const { return false; }
};

// Holds a style by value: plans list it.
class Style {
 public:
  template <std::derived_from<ParallelStyle> S>
  Style(S style)
      : style_(std::make_shared<const S>(std::move(style))) {}  // NOLINT: a plan reads as {{"a.b", ColwiseParallel()}}
  Style(std::shared_ptr<const ParallelStyle> style);            // NOLINT: throws std::invalid_argument on null

  const ParallelStyle& operator*() const { return *style_; }
  const ParallelStyle* operator->() const { return style_.get(); }

 private:
  std::shared_ptr<const ParallelStyle> style_;
};

// Gives styles to modules by name; `match` in module_tree.h says how names are matched.
//   {{"layers.*.attn.w?", ColwiseParallel()}, {"layers.*.attn.out", RowwiseParallel()}}
using ParallelPlan = std::vector<std::pair<std::string, Style>>;

// Prints one line per entry, such as "layers.*.attn.w?  ColwiseParallel(input S(1), output R)".
std::string to_string(const ParallelPlan& plan);

}  // namespace tessera

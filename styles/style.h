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

// The layouts that a style's contract names, on the tensor dimension; see Contract in dtensor/core/contract.h.
struct ContractLayouts {
  // Base names of the ATen operators that the activation meets the parameter in, of those that read contracts: matmul
  // and addmm (what linear comes down to), embedding, layer_norm, rms_norm, group_norm, conv2d; and add, of a bias to
  // the plain result of a contract with use_local_output.
  std::vector<std::string> operators;
  Placement input;                  // how a plain activation lies
  Placement desired;                // into which it is brought
  std::optional<Placement> output;  // into which the result is brought; none: as the operator left it
  bool use_local_output = false;
  bool gather_input_again = false;  // of matmul: see Contract
};

// One module while a style is applied to it. What a style asks for is collected; nothing is converted, and nothing
// communicated, before every style of the plan has been applied and all of it was found possible.
class ApplyContext {
 public:
  ApplyContext(const ModuleTree& tree, std::size_t node, const std::string& style, LayoutPlan& plan, int64_t tensor_dim,
               const std::vector<int64_t>& data_dims)
      : tree_(tree), node_(tree.at(node)), style_(style), plan_(plan), tensor_dim_(tensor_dim), data_dims_(data_dims) {}

  // The module; its path from the root ("" is the root), and its type, such as "torch::nn::LinearImpl".
  // Throws std::invalid_argument where it is a torch::jit::Module, which has none.
  torch::nn::Module& module() const;
  const std::string& path() const { return node_.path; }
  const std::string& type() const { return node_.type; }
  ModuleKind kind() const { return node_.kind; }
  // The module's own defined parameters and buffers.
  const std::vector<NamedTensor>& tensors() const { return node_.tensors; }
  // Whether there is one of that name; "out_proj.bias" is the bias of the child out_proj. So it is for `place` and
  // `contract`.
  bool has(const std::string& name) const;
  bool has_children() const { return !node_.children.empty(); }
  // True when an embedding rewrites its rows in forward (max_norm).
  bool renormalizes() const { return node_.renormalizes; }
  // Of an attention. Throws std::invalid_argument where the module is a traced one whose code does not say into how
  // many heads it cuts.
  int64_t embed_dim() const { return node_.embed_dim; }
  int64_t num_heads() const;

  // The whole mesh, the mesh dimension that styles shard over, and those that split the batch.
  const DeviceMesh& mesh() const;
  int64_t tensor_dim() const { return tensor_dim_; }
  const std::vector<int64_t>& data_dims() const { return data_dims_; }

  // The module's own parameter or buffer `name` will lie as `placement` on the tensor dimension, Replicate on every
  // other. What no style places is replicated. Throws std::invalid_argument when there is none of that name, or another
  // style has placed the same (tied) tensor otherwise.
  void place(const std::string& name, const Placement& placement);
  // Leaves a contract on it: in those operators a plain activation is this rank's piece, laid out as `input`. In every
  // other operator a plain tensor that meets the parameter, or a view of it, is refused at forward, unless `input` is
  // Replicate. Throws std::invalid_argument when an operator does not read contracts, or a tied tensor's other style
  // says otherwise of one.
  void contract(const std::string& name, const ContractLayouts& layouts);

  // Runs at every forward of the module. An exception in it fails the job (World::guard), unless `throws_alike` says
  // that it comes on every rank or on none. Throws std::invalid_argument, naming the remedy, when it is not a
  // TESSERA_MODULE.
  void forward_pre_hook(Hookable::PreHook hook, bool throws_alike = false);
  void forward_hook(Hookable::Hook hook, bool throws_alike = false);

  // Throws the std::invalid_argument of a style that does not know this module; `knows` lists what it does.
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
  int64_t tensor_dim_;
  const std::vector<int64_t>& data_dims_;
};

// How one module is parallelized. A user derives from it:
//   class BilinearByOutput : public ParallelStyle {
//     void apply(ApplyContext& context) const override { context.place("weight", Shard(0)); ... }
//     std::string name() const override { return "BilinearByOutput"; }
//   };
// `apply` must do the same on every rank, and says what it cannot do by std::invalid_argument; parallelize_module
// throws that, and any other exception, on every rank.
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  virtual void apply(ApplyContext& context) const = 0;
  // "ColwiseParallel", for messages.
  virtual std::string name() const = 0;
  // With its options, "ColwiseParallel(input R -> R, output S(-1))"; printed with the plan.
  virtual std::string to_string() const { return name(); }
  // Whether a module may have this style and another one too, as the Prepare styles: they only wrap its forward.
  virtual bool joins_others() const { return false; }
};

// A style held by value: what a plan lists.
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

// Which module gets which style: names as `match` in module_tree.h reads them.
//   {{"layers.*.attn.w?", ColwiseParallel()}, {"layers.*.attn.out", RowwiseParallel()}}
using ParallelPlan = std::vector<std::pair<std::string, Style>>;

// One line an entry: "layers.*.attn.w?  ColwiseParallel(input R -> R, output S(-1))".
std::string to_string(const ParallelPlan& plan);

}  // namespace tessera

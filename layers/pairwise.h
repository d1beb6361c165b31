#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/layers/root_of.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/styles/style.h"

// The styles of PyTorch 2.0, and what they did before and after a module.
namespace tessera {

using MaybeMesh = std::optional<DeviceMesh>;

// One of the functions below, or one's own: what the first tensor that enters a module, or leaves it, becomes. It is
// given the mesh that the module was parallelized on.
using PrepareFunction = std::function<at::Tensor(const at::Tensor&, const MaybeMesh&)>;

// Linear layers by columns and by rows in turn, as in an MLP: in every module with two or more Linear layers among its
// direct children the first, third ... by columns, the second, fourth ... by rows, and a last one without a partner is
// left whole; below every other module its children are looked through. A plain input is the whole, and the output is
// plain and whole. With `sequence` a plain input is this rank's part along dimension 0, and the output is too: what
// PyTorch 2.0 called SequenceParallel, a name that now means norms. Where a layer without a partner comes last, the
// output is a DTensor.
//   auto tp = parallelize_module(mlp, mesh, PairwiseParallel());
// With `input` and `output` functions of one's own do that for each module that holds a pair, a TESSERA_MODULE
// (hooks.h): `output` is given the DTensor. They may throw, alike on every rank.
// Communication for each pair: one all_reduce in forward, and one in backward where the input wants a gradient. With
// sequence, of an MLP of one pair: one all_gather and one reduce_scatter in forward, and the same in backward.
class PairwiseParallel {
 public:
  explicit PairwiseParallel(bool sequence = false, PrepareFunction input = nullptr, PrepareFunction output = nullptr)
      : sequence_(sequence), input_(std::move(input)), output_(std::move(output)) {}
  // Throws std::invalid_argument where there is no pair.
  ParallelPlan plan(torch::nn::Module& module) const;

 private:
  bool sequence_;
  PrepareFunction input_;
  PrepareFunction output_;
};

template <class Module>
auto parallelize_module(Module&& module, const DeviceMesh& mesh, const PairwiseParallel& style,
                        const ParallelizeOptions& options = {}) {
  const ParallelPlan plan = style.plan(detail::root_of(module));
  return parallelize_module(std::forward<Module>(module), mesh, plan, options);
}

// Functions before and after a module, which may have another style beside, here or in the plan; none leaves the tensor
// to that.
//   {"up", Prepared(ColwiseParallel(), make_input_reshard_replicate)}
// The module is a TESSERA_MODULE (hooks.h): LibTorch's own cannot be hooked. A function may throw, alike on every rank.
class Prepared : public ParallelStyle {
 public:
  explicit Prepared(Style style, PrepareFunction input = nullptr, PrepareFunction output = nullptr)
      : style_(std::move(style)), input_(std::move(input)), output_(std::move(output)) {}
  explicit Prepared(PrepareFunction input, PrepareFunction output = nullptr)
      : input_(std::move(input)), output_(std::move(output)) {}
  void apply(ApplyContext& context) const override;
  std::string name() const override { return style_ ? (*style_)->name() : "Prepared"; }
  std::string to_string() const override;
  bool joins_others() const override { return !style_ || (*style_)->joins_others(); }

 private:
  std::optional<Style> style_;
  PrepareFunction input_;
  PrepareFunction output_;
};

// An input as a DTensor over `mesh`, of one dimension: a plain one is taken for what the name says, without
// communication (shard: this rank's part, the whole being as many times as large), a DTensor is redistributed. A
// DTensor's own mesh is used where none is given. Throw std::invalid_argument, on every rank alike: a plain tensor
// without a mesh, a DTensor on another mesh than the given one, a mesh of several dimensions, an undefined tensor.
at::Tensor make_input_shard_1d(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt, int64_t dim = 0);
at::Tensor make_input_shard_1d_last_dim(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt);
at::Tensor make_input_replicate_1d(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt);
// Taken for a part along dimension 0, and gathered: one all_gather; backward one reduce_scatter where the gradient is
// pending.
at::Tensor make_input_reshard_replicate(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt);

// An output, a DTensor, redistributed; ..._tensor as a plain one: this rank's piece of that. Throw as above, and on a
// plain output.
at::Tensor make_output_shard_1d(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt, int64_t dim = 0);
at::Tensor make_output_replicate_1d(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);
at::Tensor make_output_tensor(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);
at::Tensor make_output_reshard_tensor(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);
// As it lies. Throws, too, on a pending reduction, whose terms are no part of the value.
at::Tensor make_sharded_output_tensor(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);

}  // namespace tessera

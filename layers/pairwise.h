#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/styles/style.h"

// Declares the styles of PyTorch 2.0, and the functions that they applied before and after a module.
namespace tessera {

using MaybeMesh = std::optional<DeviceMesh>;

// Replaces the first tensor that enters or leaves a module: one of the functions below, or your own. It receives the
// mesh that the module was parallelized on.
using PrepareFunction = std::function<at::Tensor(const at::Tensor&, const MaybeMesh&)>;

// Shards linear layers by columns and by rows alternately, as in an MLP. In every module with two or more Linear layers
// among its direct children the first, third ... are sharded by columns and the second, fourth ... by rows; a last
// layer without a partner stays whole. In every other module the children are searched in the same way. A plain input
// is the whole tensor, and the output is plain and whole; where a layer without a partner comes last, the output is a
// DTensor.
//   auto tp = parallelize_module(mlp, mesh, PairwiseParallel());
// With `sequence` the plain input and output are this rank's part along dimension 0. PyTorch 2.0 called that
// SequenceParallel, a name that now means a style for norms. Functions of your own as `input` and `output` prepare each
// module that holds a pair; it must then be a TESSERA_MODULE (hooks.h). `output` receives the DTensor. They may throw
// if they do so on every rank.
// Communication for each pair: one all_reduce in forward, and one in backward where the input requires a gradient. With
// `sequence`, for an MLP of one pair: one all_gather and one reduce_scatter in forward, and the same in backward.
class PairwiseParallel {
 public:
  explicit PairwiseParallel(bool sequence = false, PrepareFunction input = nullptr, PrepareFunction output = nullptr)
      : sequence_(sequence), input_(std::move(input)), output_(std::move(output)) {}
  // Throws std::invalid_argument where there is no pair; parallelize_module throws that on every rank.
  ParallelPlan plan(torch::nn::Module& module) const;

 private:
  bool sequence_;
  PrepareFunction input_;
  PrepareFunction output_;
};

// The style is a parameter of the template, so that {} stays an empty ParallelPlan.
template <class Module, std::same_as<PairwiseParallel> Pairs>
auto parallelize_module(Module&& module, const DeviceMesh& mesh, const Pairs& style,
                        const ParallelizeOptions& options = {}) {
  return detail::parallelize_by([&](torch::nn::Module& root) { return style.plan(root); }, std::forward<Module>(module),
                                mesh, options);
}

// Applies functions before and after a module, which may have another style too: here, or in another entry of the plan.
// A function that is nullptr leaves the tensors to that style.
//   {"up", Prepared(ColwiseParallel(), make_input_reshard_replicate)}
// The module must be a TESSERA_MODULE (hooks.h): LibTorch's own modules cannot be hooked. A function may throw if it
// does so on every rank.
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

// Make an input a DTensor on the 1-D `mesh`, or redistribute it if it is one. A plain tensor is taken to have the
// layout in the function's name, without communication: for a shard it is this rank's part of a whole that is
// mesh.size() times as large. Where no mesh is given, a DTensor's own is used.
// Throws std::invalid_argument, on every rank: on a plain tensor without a mesh, a DTensor on another mesh than the
// given one, a mesh of several dimensions, and an undefined tensor.
at::Tensor make_input_shard_1d(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt, int64_t dim = 0);
at::Tensor make_input_shard_1d_last_dim(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt);
at::Tensor make_input_replicate_1d(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt);
// Takes a plain input as this rank's part along dimension 0, and gathers it: one all_gather; in backward one
// reduce_scatter where the gradient is a pending reduction.
at::Tensor make_input_reshard_replicate(const at::Tensor& input, const MaybeMesh& mesh = std::nullopt);

// Redistribute an output, which must be a DTensor. Those called ..._tensor then return this rank's piece as a plain
// tensor.
// Throws as above, and on a plain output.
at::Tensor make_output_shard_1d(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt, int64_t dim = 0);
at::Tensor make_output_replicate_1d(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);
at::Tensor make_output_tensor(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);
at::Tensor make_output_reshard_tensor(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);
// Returns the piece without redistributing. Throws also on a pending reduction, whose pieces are no part of the value.
at::Tensor make_sharded_output_tensor(const at::Tensor& output, const MaybeMesh& mesh = std::nullopt);

}  // namespace tessera

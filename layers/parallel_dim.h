#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/layers/layer.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"
#include "tessera/styles/parallelize.h"

// Declares layers that are sharded along a dimension given by number, as in TorchShard, and functions that mark a
// tensor with its dimension by making it a DTensor. A plain tensor counts as replicated. Meshes are 1-D.
namespace tessera {

// Says how a linear layer x W^T + b is sharded, in terms of x A with A = W^T: not at all (none), by rows of A (0), or
// by columns of A (1 or -1).
using ParallelDim = std::optional<int64_t>;

struct ParallelDimOptions {
  bool bias = true;
  ParallelDim dim = std::nullopt;
  bool allow_uneven = false;
};

// Is torch::nn::Linear, with the same distributions of first values, and with a DTensor as output: S(-1) for columns, R
// for rows and none. Input [*, in_features]: a DTensor is redistributed from any layout; a plain tensor is the whole.
// For dim 0 a plain input may also be this rank's part of the features, in_features / n of them, or torch.chunk's part
// with allow_uneven. Either all ranks give the whole or all give their part (one feature over several ranks counts as
// the whole).
// Collectives, on more than one rank: by columns, one all_reduce of the input's gradient in backward; by rows, one
// all_reduce in forward, and for a whole input one all_gather of its gradient in backward. The redistribution of a
// DTensor input comes in addition.
// Throws std::invalid_argument in the constructor, on every rank, on any other dim, on features that are not a multiple
// of the number of ranks (unless allow_uneven), and on a mesh of several dimensions or without this rank; in forward on
// a DTensor of other features or on another mesh. A plain input of other features, which only this rank may have, fails
// the job. The parameters may be assigned, and the layer cloned, printed and put into containers, as parallel_linear.h
// says.
class ParallelLinearImpl : public Layer<ParallelLinearImpl> {
 public:
  ParallelLinearImpl(int64_t in_features, int64_t out_features, const DeviceMesh& mesh,
                     const ParallelDimOptions& options = {});
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  std::vector<LayerParameter<ParallelLinearImpl>> layer_parameters() const {
    return {
        {"weight", &ParallelLinearImpl::weight},
        {"bias", &ParallelLinearImpl::bias, options.bias, detail::ParameterLayout{mesh_, {out_features_}, bias_cut_}}};
  }

  ParallelDimOptions options;
  at::Tensor weight, bias;  // [out, in]; [out] or undefined

 private:
  at::Tensor input_on_mesh(const at::Tensor& input) const;

  int64_t in_features_, out_features_;
  DeviceMesh mesh_;
  Placement weight_cut_, bias_cut_;
  // Say whether the last dimension of the input and of the output is sharded.
  bool input_is_cut_, output_is_cut_;
};
TORCH_MODULE(ParallelLinear);

// Returns an embedding sharded by the table's rows (0), by its columns (1 or -1), or whole on every rank (none),
// whatever options.cut says. First values are given by options.init_method, or by default a normal distribution of mean
// 0 and deviation 1; the row of padding_idx is 0.
// Throws std::invalid_argument on any other dim, and where ParallelEmbedding does.
ParallelEmbedding parallel_embedding_layer(ParallelEmbeddingOptions options, ParallelDim dim, const DeviceMesh& mesh);

struct ParallelCrossEntropyOptions {
  at::Tensor weight = {};
  int64_t ignore_index = -100;
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  double label_smoothing = 0;
};
// Returns the reduction that PyTorch's two deprecated arguments ask for: nullopt if neither is given; else one that is
// not given counts as true.
std::optional<at::Reduction::Reduction> legacy_reduction(std::optional<bool> size_average, std::optional<bool> reduce);

// Computes torch::nn::functional::cross_entropy of logits [n, classes, *] and class numbers [n, *]; the result is plain
// and whole, also for DTensor logits, whose targets may be plain or DTensors.
// Collectives: those of that function on DTensors, which for sharded classes uses the kernel of sharded_cross_entropy,
// and those that gather one loss per row. Throws as that function.
at::Tensor parallel_cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                  const ParallelCrossEntropyOptions& options = {});

// The class weights, if given, are a buffer, as in torch::nn::CrossEntropyLoss.
class ParallelCrossEntropyLossImpl : public torch::nn::Cloneable<ParallelCrossEntropyLossImpl> {
 public:
  explicit ParallelCrossEntropyLossImpl(ParallelCrossEntropyOptions options = {});
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target);
  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  ParallelCrossEntropyOptions options;
  at::Tensor weight;  // undefined without one
};
TORCH_MODULE(ParallelCrossEntropyLoss);

// Computes Megatron-Core's loss: plain logits [*, classes / n] -> losses [*], one per target, smoothed by Megatron's
// formula over all classes. Give `classes`, their number over all ranks, where they are uneven; it also lets the
// function refuse logits that are whole on every rank, as gather_output leaves them, which would otherwise be taken for
// n times as many classes.
// Throws as sharded_cross_entropy.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                        double label_smoothing = 0, std::optional<int64_t> classes = std::nullopt);

// These are the layers as functions of this rank's plain piece of the weight, sharded along `dim` as above (for an
// embedding, the table's own dimension). By rows, parallel_linear takes this rank's features, or a DTensor on `mesh`;
// by columns it returns this rank's features.
// Throws std::invalid_argument, on every rank, on any other dim, on a DTensor among the other arguments, and on a mesh
// of several dimensions or without this rank. Pieces (and a bias) that do not fit, which only this rank may have, fail
// the job.
at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, ParallelDim dim,
                           const DeviceMesh& mesh);
at::Tensor parallel_embedding(const at::Tensor& ids, const at::Tensor& weight, ShardedEmbeddingOptions options,
                              ParallelDim dim, const DeviceMesh& mesh);

// Returns the plain `t` as a DTensor: this rank's piece of a tensor that is sharded along `dim`, or with none the
// whole. The other overload does so for each tensor of a list. Does not communicate. Throws std::invalid_argument on a
// dim outside the tensor's dimensions, and as from_local.
at::Tensor register_parallel_dim(const at::Tensor& t, ParallelDim dim, const DeviceMesh& mesh);
std::vector<at::Tensor> register_parallel_dim(const std::vector<at::Tensor>& list, ParallelDim dim,
                                              const DeviceMesh& mesh);
// Is register_parallel_dim as a module. A DTensor that is sharded along `dim` already is returned as it is. Throws
// std::invalid_argument on a dim outside the input's dimensions, and on a DTensor with another layout.
class RegisterParallelDimImpl : public Layer<RegisterParallelDimImpl> {
 public:
  RegisterParallelDimImpl(ParallelDim dim, const DeviceMesh& mesh);
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  std::vector<LayerParameter<RegisterParallelDimImpl>> layer_parameters() const { return {}; }

  ParallelDim dim;

 private:
  DeviceMesh mesh_;
};
TORCH_MODULE(RegisterParallelDim);
// Returns the dimension along which a tensor is sharded; none for a plain or replicated one.
ParallelDim get_parallel_dim(const at::Tensor& t);

// Fills a tensor by `method`: a plain one by itself, a DTensor with its piece of the whole tensor's values, without
// communication. Throws what `method` throws.
void shard_init_(const InitMethod& method, const at::Tensor& tensor);

// Says how the two kinds of modules are sharded.
struct ConvertedDims {
  ParallelDim linear;
  ParallelDim embedding;
};

namespace detail {
ParallelPlan converted_plan(torch::nn::Module& module, const ConvertedDims& dims);
// Returns options by which a 1-D mesh cuts tensors, also where no module is sharded.
ParallelizeOptions for_tensors(const DeviceMesh& mesh, ParallelizeOptions options);
}  // namespace detail

// Shards the parameters of all Linear and Embedding modules in `module`, or its own, in place; values, requires_grad
// and dtype stay. All other parameters are replicated, so that a module is converted once: a second call would find
// DTensors, and throw. Returns what parallelize_module returns.
// Throws what it throws, and std::invalid_argument, on every rank, on any other dim.
template <class Module>
auto convert_parallel_layers(Module&& module, const ConvertedDims& dims, const DeviceMesh& mesh,
                             const ParallelizeOptions& options = {}) {
  return detail::parallelize_by([&](torch::nn::Module& root) { return detail::converted_plan(root, dims); },
                                std::forward<Module>(module), mesh, detail::for_tensors(mesh, options));
}
// Does so for the Linear modules alone. For Embeddings too, call convert_parallel_layers in its place, not afterwards.
template <class Module>
auto convert_parallel_linear(Module&& module, ParallelDim dim, const DeviceMesh& mesh,
                             const ParallelizeOptions& options = {}) {
  return convert_parallel_layers(std::forward<Module>(module), {.linear = dim, .embedding = {}}, mesh, options);
}
// Does so for the Embedding modules alone.
template <class Module>
auto convert_parallel_embedding(Module&& module, ParallelDim dim, const DeviceMesh& mesh,
                                const ParallelizeOptions& options = {}) {
  return convert_parallel_layers(std::forward<Module>(module), {.linear = {}, .embedding = dim}, mesh, options);
}

}  // namespace tessera

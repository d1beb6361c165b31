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
#include "tessera/layers/root_of.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"
#include "tessera/styles/parallelize.h"

// Layers that are cut along a dimension given by number, and tensors that carry theirs: they are DTensors. A plain
// tensor that comes in counts as replicated. Meshes are of one dimension.
namespace tessera {

// How a linear layer x W^T + b is cut. In terms of x A with A = W^T: none, its rows (0), or its columns (1, or -1).
using ParallelDim = std::optional<int64_t>;

struct ParallelDimOptions {
  bool bias = true;
  ParallelDim dim = std::nullopt;
  bool allow_uneven = false;
};

// torch::nn::Linear with its first values' distributions, whose output is a DTensor: columns S(-1), rows and none R.
// Input [*, in_features]: a DTensor is redistributed from wherever it lies; a plain one is whole. For dim 0 a plain
// input may also have this rank's part of the features alone, in_features / n, by torch.chunk's rule with allow_uneven;
// all ranks give the whole, or all their part (one feature that several ranks share counts as the whole).
// Collectives, on more than one rank. Columns: in backward one all_reduce of the input's gradient. Rows: in forward one
// all_reduce, and in backward of a whole input one all_gather of its gradient. Those that redistribute a DTensor come
// on top. The constructor throws std::invalid_argument, on every rank alike, on another dim, on features that the ranks
// do not divide (unless allow_uneven), and on a mesh of several dimensions or without this rank; forward on a DTensor
// of other features or on another mesh. A plain input of other features, which this rank alone may have, fails the job.
// The parameters may be assigned, and the layer cloned, printed and put into containers, as parallel_linear.h says.
class ParallelLinearImpl : public Layer<ParallelLinearImpl> {
 public:
  ParallelLinearImpl(int64_t in_features, int64_t out_features, const DeviceMesh& mesh,
                     const ParallelDimOptions& options = {});
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  std::vector<LayerParameter<ParallelLinearImpl>> layer_parameters() const {
    return {{"weight", &ParallelLinearImpl::weight}, {"bias", &ParallelLinearImpl::bias, options.bias}};
  }

  ParallelDimOptions options;
  at::Tensor weight, bias;  // [out, in]; [out], or undefined

 private:
  at::Tensor input_on_mesh(const at::Tensor& input) const;

  int64_t in_features_, out_features_;
  DeviceMesh mesh_;
  // How they lie: of the input and the output the last dimension.
  Placement weight_cut_, bias_cut_;
  bool input_is_cut_, output_is_cut_;
};
TORCH_MODULE(ParallelLinear);

// The table's rows (0), its columns (1, or -1), or for none the whole on every rank, whatever options.cut says; first
// values by options.init_method, or where there is none of mean 0 and deviation 1, but for the row of padding_idx.
// Throws std::invalid_argument on another dim, and as ParallelEmbedding.
ParallelEmbedding parallel_embedding_layer(ParallelEmbeddingOptions options, ParallelDim dim, const DeviceMesh& mesh);

struct ParallelCrossEntropyOptions {
  at::Tensor weight;
  int64_t ignore_index = -100;
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  double label_smoothing = 0;
};
// What PyTorch's older two arguments ask for: neither given nullopt; each that is not given counts as true.
std::optional<at::Reduction::Reduction> legacy_reduction(std::optional<bool> size_average, std::optional<bool> reduce);

// torch::nn::functional::cross_entropy of logits [n, classes, *] and class numbers [n, *], a plain and whole result: of
// a DTensor too, with plain targets, or DTensors. Collectives: those of that function, whose kernel for cut classes is
// sharded_cross_entropy's, and those that gather a loss for each row.
at::Tensor parallel_cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                  const ParallelCrossEntropyOptions& options = {});

// Its weight, where there is one, is a buffer, as that of torch::nn::CrossEntropyLoss.
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

// Megatron-Core's: logits [*, classes / n], plain -> losses [*], one a target, smoothed by Megatron's formula over all
// classes. Logits that are whole on every rank, as gather_output leaves them, count n times unless `classes`, the
// number of all, is given: then they are refused. Uneven classes need it. Throws as sharded_cross_entropy.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                        double label_smoothing = 0, std::optional<int64_t> classes = std::nullopt);

// The layers as functions of a weight that is this rank's plain piece, cut along `dim` as above (of an embedding the
// table's own dimension). Rows of a linear layer take this rank's features, or a DTensor on `mesh`; columns give this
// rank's. Throw std::invalid_argument, on every rank alike, on another dim, a DTensor among the others, and on a mesh
// of several dimensions or without this rank; pieces that do not fit, also the bias, which this rank alone may have,
// fail the job.
at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, ParallelDim dim,
                           const DeviceMesh& mesh);
at::Tensor parallel_embedding(const at::Tensor& ids, const at::Tensor& weight, ShardedEmbeddingOptions options,
                              ParallelDim dim, const DeviceMesh& mesh);

// `t`, plain, as what it is: this rank's piece of a tensor that is cut along `dim`, or the whole on every rank. The
// same of a list.
at::Tensor register_parallel_dim(const at::Tensor& t, ParallelDim dim, const DeviceMesh& mesh);
std::vector<at::Tensor> register_parallel_dim(const std::vector<at::Tensor>& list, ParallelDim dim,
                                              const DeviceMesh& mesh);
// register_parallel_dim as a module: its output says along which dimension it is cut. Of a DTensor that is cut so
// already, itself. Throws std::invalid_argument on a dim outside the input's dimensions, and on a DTensor that is cut
// otherwise.
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
// Along which dimension a tensor is cut; none of a plain or a replicated one.
ParallelDim get_parallel_dim(const at::Tensor& t);

// Gives a tensor its first values by `method`: a plain one alone, a DTensor as the whole that it is a piece of, without
// communication.
void shard_init_(const InitMethod& method, const at::Tensor& tensor);

namespace detail {
ParallelPlan linear_plan(torch::nn::Module& module, ParallelDim dim);
ParallelPlan embedding_plan(torch::nn::Module& module, ParallelDim dim);
}  // namespace detail

// Cuts the parameters of all Linear (Embedding) modules in `module`, or of itself, in place: values, requires_grad and
// dtype stay. Returns what parallelize_module does, and throws as it does, and std::invalid_argument on another dim.
template <class Module>
auto convert_parallel_linear(Module&& module, ParallelDim dim, const DeviceMesh& mesh,
                             const ParallelizeOptions& options = {}) {
  return parallelize_module(module, mesh, detail::linear_plan(detail::root_of(module), dim), options);
}
template <class Module>
auto convert_parallel_embedding(Module&& module, ParallelDim dim, const DeviceMesh& mesh,
                                const ParallelizeOptions& options = {}) {
  return parallelize_module(module, mesh, detail::embedding_plan(detail::root_of(module), dim), options);
}

}  // namespace tessera

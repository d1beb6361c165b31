#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "tessera/layers/init_type.h"
#include "tessera/layers/layer.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// Linear layers y = x W^T + b, W [out, in], whose weight is sharded by features over the ranks of a 1-D mesh.
//
// Parameters are DTensors, and their first values do not depend on the number of ranks. For a plain input, each rank's
// own tensor, the output is plain, as in the libraries that these layers come from; for a DTensor input the output is a
// DTensor, and the input is redistributed as needed.
//
// The layers are modules like LibTorch's own: they can be put into Sequential and AnyModule, printed and cloned
// (layer.h; a clone has no main_grad). A parameter may be assigned, for example to tie two layers (`head->weight =
// table->weight`): a DTensor of the same mesh and sizes, which each forward redistributes if it has another layout, or
// this rank's plain piece. What is assigned is also what save_weights, load_weights and sharded_state_dict take.
namespace tessera {

struct ModelParallelConfig {
  at::ScalarType params_dtype = at::kFloat;
  bool perform_initialization = true;  // false: parameters are not filled
  // Has no effect: an element's value follows from its place in the whole weight, on every device.
  bool use_cpu_initialization = false;
  // Activations between parallel layers are sharded along dimension 0, the sequence.
  bool sequence_parallel = false;
  // Has no effect: the input's gradient is always reduced while the weight's is computed, except in a layer with an
  // adapter.
  bool async_tensor_model_parallel_allreduce = false;
  // The weight's gradient is added to the layer's `main_grad`, which the caller must set before training.
  bool gradient_accumulation_fusion = false;
  int64_t expert_model_parallel_size = 1;
};

// The output, and the bias that the caller is to add where skip_bias_add is set; else undefined.
struct LinearOutput {
  at::Tensor output;
  at::Tensor bias;
};

// Holds the options of both linear layers.
struct ParallelLinearOptions {
  ParallelLinearOptions(int64_t input_size, int64_t output_size) : input_size(input_size), output_size(output_size) {}

  int64_t input_size;
  int64_t output_size;
  bool bias = true;
  InitMethod init_method = tessera::init_method(InitType::kXavierNormal);  // for the weight; biases are 0
  int64_t stride = 1;  // blocks of the weight per rank, assigned to ranks in turn
  bool skip_bias_add = false;
  bool is_expert = false;  // with sequence_parallel or several expert ranks the layer does not communicate
  // Allows features that are not a multiple of the number of ranks, split as torch.chunk does; a sequence stays even.
  bool allow_uneven = false;
  std::optional<int64_t> lora_rank;  // adds x A^T B^T; A is [lora_rank, in], B is [out, lora_rank] and 0 at first
  std::string tp_comm_buffer_name;   // has no effect: no communication buffers are shared here
  ModelParallelConfig config = {};
};

struct ColumnParallelOptions : ParallelLinearOptions {
  using ParallelLinearOptions::ParallelLinearOptions;
  // The output is whole on every rank. Libraries have different defaults: see the functions below.
  bool gather_output = false;
  // The layer has no weight: forward is given one, such as a tied embedding's.
  bool skip_weight_param_allocation = false;
  // Return options with a library's defaults: Megatron-Core leaves the output sharded, FairScale and ml gather it.
  static ColumnParallelOptions megatron(int64_t input_size, int64_t output_size);
  static ColumnParallelOptions fairscale(int64_t input_size, int64_t output_size);
  static ColumnParallelOptions ml(int64_t input_size, int64_t output_size);
};

struct RowParallelOptions : ParallelLinearOptions {
  using ParallelLinearOptions::ParallelLinearOptions;
  // true: the input has only this rank's features, as a column parallel layer returns them. false: the input is whole,
  // and each rank takes its part.
  bool input_is_parallel = false;
};

// Holds the parameters of both linear layers.
class ParallelLinearBase {
 public:
  const DeviceMesh& mesh() const { return mesh_; }
  // Have sizes [out, in] and [out], or are undefined where the layer has none.
  at::Tensor weight, bias;
  at::Tensor lora_a, lora_b;  // undefined without lora_rank
  // Is set by the caller for gradient_accumulation_fusion: a plain tensor of the sizes of this rank's piece, in float32
  // or the weight's dtype.
  at::Tensor main_grad;

  // Return the whole weight and bias, plain and detached, with features in their usual order for any stride. On more
  // than one rank each runs one all_gather, but master_bias of a row parallel layer, whose bias every rank has, runs
  // none. master_weight throws std::invalid_argument on a layer without a weight (skip_weight_param_allocation).
  at::Tensor master_weight() const;
  at::Tensor master_bias() const;  // undefined without a bias

  // There is no extra state: what another library's layer saved is accepted and dropped, and load_weights skips it in a
  // file.
  at::Tensor get_extra_state() const { return {}; }
  void set_extra_state(const at::Tensor& /*state*/) {}

 protected:
  // Shards dimension `tensor_dim` of the weight.
  ParallelLinearBase(const ParallelLinearOptions& options, DeviceMesh mesh, int64_t tensor_dim, const char* who);
  void make_parameters(const ParallelLinearOptions& options, bool with_weight);
  // Return the parameters in the form that a layer uses; a bias that is not there is undefined.
  at::Tensor weight_piece(const at::Tensor& used) const;
  at::Tensor bias_piece(const std::optional<Placement>& gradient = std::nullopt) const;
  at::Tensor bias_on_mesh() const;
  // Returns what the adapter adds to the product with `input`, this rank's features or rows: for columns this rank's
  // part of the output, for rows one term of the sum.
  at::Tensor adapted(const ParallelLinearOptions& options, const at::Tensor& input) const;
  // Returns the tensor that the gradient of `piece`, the weight in use, is added to. Fails the job where
  // gradient_accumulation_fusion is set, a gradient is needed and there is no usable main_grad.
  at::Tensor checked_main_grad(const at::Tensor& piece, const ModelParallelConfig& config) const;
  template <class Class>
  std::vector<LayerParameter<Class>> parameters_of(const ParallelLinearOptions& options, bool with_weight) const {
    using Layout = detail::ParameterLayout;
    const bool adapter = options.lora_rank.has_value();
    return {{"weight", &Class::weight, with_weight, Layout{mesh_, {output_size_, input_size_}, cut_}},
            {"bias", &Class::bias, options.bias, Layout{mesh_, {output_size_}, bias_cut_}},
            {"lora_a", &Class::lora_a, adapter},
            {"lora_b", &Class::lora_b, adapter}};
  }

  DeviceMesh mesh_;
  const char* who_;
  int64_t output_size_, input_size_;
  Placement cut_;  // the weight's placement
  Placement bias_cut_;
};

// Shards W by its rows, the output features. Input: whole [*, in] on every rank, or with sequence_parallel this rank's
// part along dimension 0. Output: this rank's features [*, out / n], or with gather_output all of them.
//
// Collectives in forward, on more than one rank: none; one all_gather with sequence_parallel; one all_gather with
// gather_output, and another one for a bias that is skipped.
// Collectives in backward: one all_reduce of the input's gradient, or with sequence_parallel one all_gather and one
// reduce_scatter. With a DTensor input there are as many. An adapter adds one all_reduce of lora_a's gradient; with
// sequence_parallel it keeps the gathered input, which is then not gathered again.
// Throws std::invalid_argument in the constructor, on every rank, on features that are not a multiple of ranks * stride
// (unless allow_uneven), and on a mesh of several dimensions or without this rank; in forward, on every rank, on a
// whole input with other features, and with sequence_parallel on an input of one dimension. A wrong piece or main_grad,
// which only this rank may have, fails the job.
class ColumnParallelLinearImpl : public Layer<ColumnParallelLinearImpl>, public ParallelLinearBase {
 public:
  ColumnParallelLinearImpl(const ColumnParallelOptions& options, const DeviceMesh& mesh);
  // The output lacks the bias with skip_bias_add. `given_weight`, a DTensor or this rank's plain piece, is for
  // skip_weight_param_allocation, and is used instead of the layer's own.
  // Throws std::invalid_argument where there is no weight, and on a DTensor of other sizes or on another mesh; a plain
  // piece of other sizes fails the job.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& given_weight = {});
  // Also returns the bias that was skipped, in the output's layout.
  LinearOutput forward_with_bias(const at::Tensor& input, const at::Tensor& given_weight = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  std::vector<LayerParameter<ColumnParallelLinearImpl>> layer_parameters() const;

  ColumnParallelOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

 private:
  at::Tensor weight_here(const at::Tensor& given) const;
  at::Tensor multiply(const at::Tensor& input, const at::Tensor& weight, int64_t sequence_size) const;
};
TORCH_MODULE(ColumnParallelLinear);

// Shards W by its columns, the input features. Input: this rank's features [*, in / n], or the whole, of which the
// layer takes them. Output: whole [*, out] on every rank, or with sequence_parallel this rank's part along dimension 0.
// The bias is added once, after the reduction.
//
// Collectives in forward, on more than one rank: one all_reduce, or one reduce_scatter with sequence_parallel.
// Collectives in backward: none where the input is parallel, else one all_gather of the input's gradient; with
// sequence_parallel one all_gather, and one all_reduce of the bias's gradient. An adapter adds one all_reduce of
// lora_b's gradient.
// Throws in the constructor where ColumnParallelLinear does, on sequence_parallel with an input that is not parallel,
// and on an expert layer that does not communicate (is_expert) and has a bias that is not skipped.
class RowParallelLinearImpl : public Layer<RowParallelLinearImpl>, public ParallelLinearBase {
 public:
  RowParallelLinearImpl(const RowParallelOptions& options, const DeviceMesh& mesh);
  at::Tensor forward(const at::Tensor& input);
  LinearOutput forward_with_bias(const at::Tensor& input);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  std::vector<LayerParameter<RowParallelLinearImpl>> layer_parameters() const;

  RowParallelOptions options;

 private:
  at::Tensor multiply(const at::Tensor& input) const;
  LinearOutput of_plain(const at::Tensor& input) const;
  LinearOutput of_dtensor(const at::Tensor& input) const;
};
TORCH_MODULE(RowParallelLinear);

}  // namespace tessera

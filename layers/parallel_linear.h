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

// Linear layers whose weight is cut over the ranks of a mesh of one dimension, by features: y = x W^T + b with W [out,
// in].
//
// Parameters are DTensors, of values that do not depend on the number of ranks. What goes in and comes out is plain
// where the input is: each rank's own tensor, as the families that these come from have it; of a DTensor input the
// output is a DTensor, and the input is brought where it is needed.
//
// The layers are modules as LibTorch's own: in Sequential and AnyModule, printed, cloned (layer.h; a clone has no
// main_grad). A parameter may be assigned, as to tie two layers (`head->weight = table->weight`): a DTensor of the same
// mesh and sizes, which is redistributed in each forward where it lies otherwise, or this rank's plain piece.
namespace tessera {

struct ModelParallelConfig {
  at::ScalarType params_dtype = at::kFloat;
  bool perform_initialization = true;  // else parameters are not filled
  // Values come from an element's place in the whole weight on every device, so this changes nothing.
  bool use_cpu_initialization = false;
  // Activations between parallel layers are cut along dimension 0, the sequence's.
  bool sequence_parallel = false;
  // The reduction of the input's gradient always runs while the weight's is computed, but for a layer with an adapter,
  // so this changes nothing.
  bool async_tensor_model_parallel_allreduce = false;
  // The gradient of the weight is added to `main_grad` of the layer, which training needs.
  bool gradient_accumulation_fusion = false;
  int64_t expert_model_parallel_size = 1;
};

// The output, and the bias that the caller is to add where it was skipped; else undefined.
struct LinearOutput {
  at::Tensor output;
  at::Tensor bias;
};

// What both linear layers are made of.
struct ParallelLinearOptions {
  ParallelLinearOptions(int64_t input_size, int64_t output_size) : input_size(input_size), output_size(output_size) {}

  int64_t input_size;
  int64_t output_size;
  bool bias = true;
  InitMethod init_method = tessera::init_method(InitType::kXavierNormal);  // of the weight; biases are 0
  int64_t stride = 1;  // pieces of the weight a rank, dealt out in turn
  bool skip_bias_add = false;
  bool is_expert = false;     // with sequence_parallel or several expert ranks nothing is gathered or reduced inside
  bool allow_uneven = false;  // features that the ranks do not divide, by torch.chunk's rule; a plain sequence is even
  std::optional<int64_t> lora_rank;  // adds x A^T B^T with A [lora_rank, in] and B [out, lora_rank], which begins at 0
  std::string tp_comm_buffer_name;   // of another engine's buffer: nothing is shared here, so this changes nothing
  ModelParallelConfig config = {};
};

struct ColumnParallelOptions : ParallelLinearOptions {
  using ParallelLinearOptions::ParallelLinearOptions;
  // The output is whole on every rank. A library's own default: see the factories.
  bool gather_output = false;
  // forward is given the weight, such as a tied embedding's.
  bool skip_weight_param_allocation = false;
  // With each library's own defaults: Megatron-Core leaves the output cut, FairScale and ml gather it.
  static ColumnParallelOptions megatron(int64_t input_size, int64_t output_size);
  static ColumnParallelOptions fairscale(int64_t input_size, int64_t output_size);
  static ColumnParallelOptions ml(int64_t input_size, int64_t output_size);
};

struct RowParallelOptions : ParallelLinearOptions {
  using ParallelLinearOptions::ParallelLinearOptions;
  // The input is this rank's features alone, as a column parallel layer leaves them; else each rank takes its part of
  // the whole.
  bool input_is_parallel = false;
};

// The parameters of both linear layers.
class ParallelLinearBase {
 public:
  const DeviceMesh& mesh() const { return mesh_; }
  // [out, in], or undefined without one; [out], or undefined.
  at::Tensor weight, bias;
  at::Tensor lora_a, lora_b;  // undefined without an adapter
  // Of gradient_accumulation_fusion: plain, of this rank's piece, float32 or the weight's dtype; the caller's.
  at::Tensor main_grad;

  // The whole, plain and detached, in the order of its features whatever the stride is. One all_gather on more than one
  // rank.
  at::Tensor master_weight() const;
  at::Tensor master_bias() const;  // undefined without a bias

  // None, and whatever another engine's layer left there is taken and dropped; load_weights passes over it in a file.
  at::Tensor get_extra_state() const { return {}; }
  void set_extra_state(const at::Tensor& /*state*/) {}

 protected:
  // `tensor_dim` of the weight is cut.
  ParallelLinearBase(const ParallelLinearOptions& options, DeviceMesh mesh, int64_t tensor_dim, const char* who);
  void make_parameters(const ParallelLinearOptions& options, bool with_weight);
  // What the members hold, as the layer uses it, of `options`.
  at::Tensor weight_piece(const ParallelLinearOptions& options, const at::Tensor& used) const;
  at::Tensor bias_piece(const ParallelLinearOptions& options,
                        const std::optional<Placement>& gradient = std::nullopt) const;
  at::Tensor bias_on_mesh(const ParallelLinearOptions& options) const;
  // What the adapter adds to the product of `input`, this rank's features or rows of it: each rank's part of the cut
  // one, a term of the other.
  at::Tensor adapted(const ParallelLinearOptions& options, const at::Tensor& input) const;
  // What the gradient of `piece`, the weight that is used, is added to. Fails the job where
  // gradient_accumulation_fusion has nowhere to add one that is wanted to.
  at::Tensor checked_main_grad(const at::Tensor& piece, const ModelParallelConfig& config) const;
  template <class Class>
  static std::vector<LayerParameter<Class>> parameters_of(const ParallelLinearOptions& options, bool with_weight) {
    const bool adapter = options.lora_rank.has_value();
    return {{"weight", &Class::weight, with_weight},
            {"bias", &Class::bias, options.bias},
            {"lora_a", &Class::lora_a, adapter},
            {"lora_b", &Class::lora_b, adapter}};
  }

  DeviceMesh mesh_;
  const char* who_;
  Placement cut_;  // of the weight
  Placement bias_cut_;
};

// W by its rows, so by output features: input whole [*, in] on every rank (under sequence_parallel its part along
// dimension 0) -> this rank's features of the output [*, out / n], or all with gather_output.
//
// Collectives, on more than one rank. Forward: none; sequence_parallel one all_gather; gather_output one all_gather.
// Backward: one all_reduce of the input's gradient; sequence_parallel one all_gather and one reduce_scatter; with a
// DTensor input as many. A bias that is skipped and gathered has an all_gather of its own. An adapter has one
// all_reduce more in backward, of lora_a's gradient, and with a sequence keeps the gathered input, which is not
// gathered again.
// The constructor throws std::invalid_argument, on every rank alike, on features that the ranks times stride do not
// divide (unless allow_uneven), and on a mesh of several dimensions or without this rank. forward throws it, alike on
// every rank, on other features of a whole input, and with a sequence on one of a single dimension; what one rank alone
// may have wrong, a piece or a main_grad, fails the job.
class ColumnParallelLinearImpl : public Layer<ColumnParallelLinearImpl>, public ParallelLinearBase {
 public:
  ColumnParallelLinearImpl(const ColumnParallelOptions& options, const DeviceMesh& mesh);
  // With skip_bias_add without the bias. `given_weight`, a DTensor or this rank's plain piece, is for
  // skip_weight_param_allocation, and goes before the layer's own. Throws std::invalid_argument where there is no
  // weight, and on a DTensor of other sizes or on another mesh; a plain piece of other sizes fails the job.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& given_weight = {});
  // The bias that was skipped lies as the output does.
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

// W by its columns, so by input features: this rank's features of the input [*, in / n] (or the whole, of which it
// takes them) -> the output whole [*, out] on every rank, under sequence_parallel its part along dimension 0. The bias
// is added once, after the reduction.
//
// Collectives, on more than one rank. Forward: one all_reduce; sequence_parallel one reduce_scatter. Backward: none
// where the input is parallel, else one all_gather of the input's gradient; sequence_parallel one all_gather, and one
// all_reduce of the bias's gradient. An adapter has one all_reduce more in backward, of lora_b's gradient.
// The constructor throws as ColumnParallelLinear's, and on sequence_parallel with an input that is not parallel.
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

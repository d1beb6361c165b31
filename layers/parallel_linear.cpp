#include "tessera/layers/parallel_linear.h"

#include <cmath>
#include <ostream>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/layers/sharded_linear.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const char* who, const std::string& why) {
  throw std::invalid_argument(fmt::format("{}: {}", who, why));
}

// Returns the placement of a weight; `who` names the layer in what affine_placement throws.
Placement cut_of(const char* who, int64_t tensor_dim, int64_t size, const DeviceMesh& mesh,
                 const ParallelLinearOptions& options) {
  try {
    return affine_placement(tensor_dim, size, mesh.size(), options.stride, options.allow_uneven);
  } catch (const std::invalid_argument& error) {
    refuse(who, error.what());
  }
}

DeviceMesh checked_mesh(DeviceMesh mesh, const char* who) {
  check_one_dimension(mesh, who);
  return mesh;
}

ColumnParallelOptions gathering(int64_t input_size, int64_t output_size) {
  ColumnParallelOptions options(input_size, output_size);
  options.gather_output = true;
  return options;
}

// Says whether the code that routes an expert's tokens communicates instead: then the layer neither gathers nor
// reduces.
bool routed_outside(const ParallelLinearOptions& options) {
  return options.is_expert && (options.config.sequence_parallel || options.config.expert_model_parallel_size > 1);
}

// Checks an input's features and, with a sequence, that dimension 0 is not its only one. An error in a whole input is
// the same on every rank; only this rank may have a wrong piece.
struct InputCheck {
  const DeviceMesh& mesh;
  const char* who;
  bool whole = true;

  void features(const at::Tensor& input, int64_t wanted) const {
    if (!input.defined()) refuse(who, "the input is undefined");
    if (input.dim() >= 1 && input.size(-1) == wanted) return;
    fail(fmt::format("input [{}]; it has {} features, input_size, in its last dimension",
                     fmt::join(input.sizes(), ", "), wanted));
  }
  void sequence(const at::Tensor& input) const {
    if (input.dim() >= 2) return;
    fail(fmt::format("input [{}] with sequence_parallel; it is [sequence, *, features]",
                     fmt::join(input.sizes(), ", ")));
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    if (whole) refuse(who, why);
    refuse_alone(mesh, who, why);
  }
};

// Both layers print these: first text_of, the options that each has; last with_rest, those that are seldom set.
detail::LayerText text_of(const char* who, const ParallelLinearOptions& options) {
  detail::LayerText text(who);
  return text.add("input_size", options.input_size).add("output_size", options.output_size).add("bias", options.bias);
}

detail::LayerText& with_rest(detail::LayerText& text, const ParallelLinearOptions& options) {
  const ModelParallelConfig usual, &config = options.config;
  text.add_unless(int64_t{1}, "stride", options.stride)
      .add_unless(false, "skip_bias_add", options.skip_bias_add)
      .add_unless(false, "is_expert", options.is_expert)
      .add_unless(false, "allow_uneven", options.allow_uneven);
  if (options.lora_rank) text.add("lora_rank", *options.lora_rank);
  if (config.params_dtype != usual.params_dtype) text.add("params_dtype", c10::toString(config.params_dtype));
  return text.add_unless(false, "sequence_parallel", config.sequence_parallel)
      .add_unless(false, "gradient_accumulation_fusion", config.gradient_accumulation_fusion)
      .add_unless(int64_t{1}, "expert_model_parallel_size", config.expert_model_parallel_size);
}

// Returns this rank's piece of a DTensor input redistributed to `wanted`; the piece's gradient has placement
// `gradient`.
at::Tensor piece_as(const at::Tensor& input, const DeviceMesh& mesh, const Placement& wanted, const Placement& gradient,
                    const char* who) {
  if (!(mesh_of(input) == mesh)) {
    refuse(who, fmt::format("the input is on mesh {}, the layer on {}; redistribute it with redistribute_to",
                            mesh_of(input).to_string(), mesh.to_string()));
  }
  return to_local(redistribute(input, {wanted}), Placements{gradient});
}

}  // namespace

ColumnParallelOptions ColumnParallelOptions::megatron(int64_t input_size, int64_t output_size) {
  return {input_size, output_size};
}
ColumnParallelOptions ColumnParallelOptions::fairscale(int64_t input_size, int64_t output_size) {
  return gathering(input_size, output_size);
}
ColumnParallelOptions ColumnParallelOptions::ml(int64_t input_size, int64_t output_size) {
  return gathering(input_size, output_size);
}

// ---- Both ---------------------------------------------------------------------------------------------------------

ParallelLinearBase::ParallelLinearBase(const ParallelLinearOptions& options, DeviceMesh mesh, int64_t tensor_dim,
                                       const char* who)
    : mesh_(checked_mesh(std::move(mesh), who)),
      who_(who),
      output_size_(options.output_size),
      input_size_(options.input_size),
      cut_(cut_of(who, tensor_dim, tensor_dim == 0 ? output_size_ : input_size_, mesh_, options)),
      bias_cut_(tensor_dim == 0 ? cut_ : Replicate()) {
  if (options.input_size < 1 || options.output_size < 1) {
    refuse(who, fmt::format("{} input and {} output features; give at least one of each", options.input_size,
                            options.output_size));
  }
  if (options.lora_rank && *options.lora_rank < 1)
    refuse(who, fmt::format("lora_rank {}; it is at least 1", *options.lora_rank));
}

void ParallelLinearBase::make_parameters(const ParallelLinearOptions& options, bool with_weight) {
  const auto make = [&](at::IntArrayRef sizes, const Placement& cut, const InitMethod& method) {
    const at::Tensor made = empty(sizes, mesh_, {cut}, options.config.params_dtype);
    if (options.config.perform_initialization) {
      const c10::AutoGradMode none(false);
      method(made);
    }
    return made.set_requires_grad(true);
  };
  const InitMethod zero = init_method(InitType::kZeros);
  if (with_weight) weight = make({options.output_size, options.input_size}, cut_, options.init_method);
  if (options.bias) bias = make({options.output_size}, bias_cut_, zero);
  if (!options.lora_rank) return;
  const InitMethod kaiming = [](const at::Tensor& t) { torch::nn::init::kaiming_uniform_(t, std::sqrt(5.0)); };
  const bool by_output = cut_.tensor_dim() == 0;
  lora_a = make({*options.lora_rank, options.input_size}, by_output ? Replicate() : cut_, kaiming);
  lora_b = make({options.output_size, *options.lora_rank}, by_output ? cut_ : Replicate(), zero);
}

at::Tensor ParallelLinearBase::weight_piece(const at::Tensor& used) const {
  return detail::parameter_piece(used, {"weight", {output_size_, input_size_}, cut_}, mesh_, who_);
}

at::Tensor ParallelLinearBase::bias_piece(const std::optional<Placement>& gradient) const {
  if (!bias.defined()) return bias;
  return detail::parameter_piece(bias, {"bias", {output_size_}, bias_cut_, gradient}, mesh_, who_);
}

at::Tensor ParallelLinearBase::bias_on_mesh() const {
  if (!bias.defined()) return bias;
  return detail::parameter_on_mesh(bias, {"bias", {output_size_}, bias_cut_}, mesh_, who_);
}

at::Tensor ParallelLinearBase::adapted(const ParallelLinearOptions& options, const at::Tensor& input) const {
  const auto piece = [&](const at::Tensor& t, const char* name, int64_t rows, int64_t columns, bool is_cut) {
    const Placement whole = Replicate();
    const auto gradient = is_cut ? std::nullopt : std::make_optional(Partial());
    return detail::parameter_piece(t, {name, {rows, columns}, is_cut ? cut_ : whole, gradient}, mesh_, who_);
  };
  const bool by_output = cut_.tensor_dim() == 0;
  const at::Tensor low = at::linear(input, piece(lora_a, "lora_a", *options.lora_rank, options.input_size, !by_output));
  return at::linear(low, piece(lora_b, "lora_b", options.output_size, *options.lora_rank, by_output));
}

at::Tensor ParallelLinearBase::checked_main_grad(const at::Tensor& piece, const ModelParallelConfig& config) const {
  const bool wanted = c10::GradMode::is_enabled() && piece.requires_grad();
  if (!config.gradient_accumulation_fusion || !wanted) return {};
  if (main_grad.defined()) return main_grad;
  refuse_alone(mesh_, who_,
               "gradient_accumulation_fusion without main_grad; set the layer's, a plain tensor of this rank's piece "
               "of the weight");
}

at::Tensor ParallelLinearBase::master_weight() const {
  if (!weight.defined()) refuse(who_, "master_weight of a layer that has no weight of its own");
  return detail::whole_parameter(weight, {"weight", {output_size_, input_size_}, cut_}, mesh_, who_);
}

at::Tensor ParallelLinearBase::master_bias() const {
  return bias.defined() ? detail::whole_parameter(bias, {"bias", {output_size_}, bias_cut_}, mesh_, who_) : bias;
}

// ---- By columns ---------------------------------------------------------------------------------------------------

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const ColumnParallelOptions& given, const DeviceMesh& mesh)
    : Layer("ColumnParallelLinear"), ParallelLinearBase(given, mesh, 0, "ColumnParallelLinear"), options(given) {
  make_parameters(options, !options.skip_weight_param_allocation);
  reset();
}

void ColumnParallelLinearImpl::reset() {
  main_grad = at::Tensor();
  Layer::reset();
}

std::vector<LayerParameter<ColumnParallelLinearImpl>> ColumnParallelLinearImpl::layer_parameters() const {
  return parameters_of<ColumnParallelLinearImpl>(options, !options.skip_weight_param_allocation);
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  detail::LayerText text = text_of(who_, options);
  text.add("gather_output", options.gather_output);
  text.add_unless(false, "skip_weight_param_allocation", options.skip_weight_param_allocation);
  stream << with_rest(text, options).text();
}

at::Tensor ColumnParallelLinearImpl::weight_here(const at::Tensor& given) const {
  const at::Tensor& used = given.defined() ? given : weight;
  if (!used.defined()) refuse(who_, "weight was not supplied to forward, and skip_weight_param_allocation is true");
  return weight_piece(used);
}

// Returns this rank's output features. The products of the weight and of the adapter share the input, so it is gathered
// here once.
at::Tensor ColumnParallelLinearImpl::multiply(const at::Tensor& input, const at::Tensor& weight,
                                              int64_t sequence_size) const {
  const bool communicates = !routed_outside(options);
  const bool in_sequence = communicates && options.config.sequence_parallel;
  const at::Tensor bias_here = options.skip_bias_add ? at::Tensor() : bias_piece();
  ShardedLinearOptions how{.main_grad = checked_main_grad(weight, options.config)};
  if (!lora_a.defined()) {
    how.reduce_input_gradient = communicates;
    how.sequence_parallel = in_sequence;
    how.sequence_size = in_sequence ? sequence_size : -1;
    return sharded_linear(input, weight, bias_here, mesh_, how);
  }
  at::Tensor here = input;
  if (in_sequence) {
    here = gather_from_sequence_region(input, mesh_, true,
                                       sequence_size >= 0 ? std::make_optional(sequence_size) : std::nullopt);
  } else if (communicates) {
    here = copy_to_region(input, mesh_);
  }
  return sharded_linear(here, weight, bias_here, mesh_, how) + adapted(options, here);
}

LinearOutput ColumnParallelLinearImpl::forward_with_bias(const at::Tensor& input, const at::Tensor& given_weight) {
  const bool global = is_dtensor(input);
  const bool gathers = options.gather_output && !routed_outside(options);
  const bool in_sequence = options.config.sequence_parallel && !routed_outside(options);
  const InputCheck check{.mesh = mesh_, .who = who_, .whole = global || !in_sequence};
  check.features(input, options.input_size);
  if (in_sequence) check.sequence(input);
  const at::Tensor piece = weight_here(given_weight);
  const Placement wanted = in_sequence ? Shard(0) : Replicate();
  // On each rank an expert's columns give one term of the input's gradient.
  const Placement gradient = routed_outside(options) ? Partial() : wanted;
  const at::Tensor here = global ? piece_as(input, mesh_, wanted, gradient, who_) : input;
  const at::Tensor output = multiply(here, piece, global ? input.size(0) : -1);
  const bool skips = options.skip_bias_add;
  if (!global && !gathers) return {.output = output, .bias = skips ? bias_piece() : at::Tensor()};
  const at::Tensor skipped = skips ? bias_on_mesh() : at::Tensor();
  const at::Tensor cut = from_local(output, mesh_, {cut_.on(output.dim() - 1)},
                                    {.shape = detail::with_last(output.sizes(), options.output_size)});
  if (!gathers) return {.output = cut, .bias = skipped};
  const auto whole = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    return global ? redistribute(t, {Replicate()}) : full_tensor(t);
  };
  return {.output = whole(cut), .bias = whole(skipped)};
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input, const at::Tensor& given_weight) {
  return forward_with_bias(input, given_weight).output;
}

// ---- By rows ------------------------------------------------------------------------------------------------------

RowParallelLinearImpl::RowParallelLinearImpl(const RowParallelOptions& given, const DeviceMesh& mesh)
    : Layer("RowParallelLinear"), ParallelLinearBase(given, mesh, 1, "RowParallelLinear"), options(given) {
  if (options.config.sequence_parallel && !options.input_is_parallel) {
    refuse(who_, "to enable sequence_parallel, input_is_parallel must be true");
  }
  if (routed_outside(options) && options.bias && !options.skip_bias_add) {
    refuse(
        who_,
        "an expert's output is reduced by the code that routes its tokens, which must add the bias: set skip_bias_add");
  }
  make_parameters(options, true);
  reset();
}

void RowParallelLinearImpl::reset() {
  main_grad = at::Tensor();
  Layer::reset();
}

std::vector<LayerParameter<RowParallelLinearImpl>> RowParallelLinearImpl::layer_parameters() const {
  return parameters_of<RowParallelLinearImpl>(options, true);
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  detail::LayerText text = text_of(who_, options);
  text.add("input_is_parallel", options.input_is_parallel);
  stream << with_rest(text, options).text();
}

// Returns this rank's term of the output, without the bias.
at::Tensor RowParallelLinearImpl::multiply(const at::Tensor& input) const {
  const at::Tensor piece = weight_piece(weight);
  const at::Tensor term =
      sharded_linear(input, piece, {}, mesh_, {.main_grad = checked_main_grad(piece, options.config)});
  return lora_a.defined() ? term + adapted(options, input) : term;
}

LinearOutput RowParallelLinearImpl::of_plain(const at::Tensor& input) const {
  at::Tensor here = input;
  if (!options.input_is_parallel) {
    here = to_local(redistribute(from_local(input, mesh_, {Replicate()}), {cut_.on(input.dim() - 1)}));
  }
  const bool in_sequence = options.config.sequence_parallel;
  if (!lora_a.defined() && !in_sequence && !routed_outside(options)) {
    const at::Tensor whole_bias = bias_piece();
    const at::Tensor piece = weight_piece(weight);
    const at::Tensor output =
        sharded_linear(here, piece, options.skip_bias_add ? at::Tensor() : whole_bias, mesh_,
                       {.reduce_output = true, .main_grad = checked_main_grad(piece, options.config)});
    return {.output = output, .bias = options.skip_bias_add ? whole_bias : at::Tensor()};
  }
  at::Tensor output = multiply(here);
  if (!routed_outside(options)) {
    output = in_sequence ? reduce_scatter_to_sequence_region(output, mesh_) : reduce_from_region(output, mesh_);
  }
  if (!bias.defined()) return {.output = output, .bias = {}};
  // Each rank's part of a sequence gives one term of the bias's gradient.
  const at::Tensor here_bias = bias_piece(in_sequence ? Partial() : Replicate());
  if (options.skip_bias_add) return {.output = output, .bias = here_bias};
  return {.output = output + here_bias.to(output.scalar_type()), .bias = {}};
}

LinearOutput RowParallelLinearImpl::of_dtensor(const at::Tensor& input) const {
  const Placement wanted = cut_.on(input.dim() - 1);
  const at::Tensor term = multiply(piece_as(input, mesh_, wanted, wanted, who_));
  at::Tensor output =
      from_local(term, mesh_, {Partial()}, {.shape = detail::with_last(input.sizes(), options.output_size)});
  if (!routed_outside(options)) {
    output = redistribute(output, {options.config.sequence_parallel ? Shard(0) : Replicate()});
  }
  const at::Tensor added = bias_on_mesh();
  if (!added.defined() || options.skip_bias_add) return {.output = output, .bias = added};
  return {.output = output + added.to(output.scalar_type()), .bias = {}};
}

LinearOutput RowParallelLinearImpl::forward_with_bias(const at::Tensor& input) {
  const bool whole = !input.defined() || is_dtensor(input) || !options.input_is_parallel;
  const InputCheck check{.mesh = mesh_, .who = who_, .whole = whole};
  if (whole) check.features(input, options.input_size);
  if (options.config.sequence_parallel && !routed_outside(options)) check.sequence(input);
  return is_dtensor(input) ? of_dtensor(input) : of_plain(input);
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) { return forward_with_bias(input).output; }

}  // namespace tessera

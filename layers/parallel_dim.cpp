#include "tessera/layers/parallel_dim.h"

#include <cmath>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/layers/sharded_linear.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/styles/module_tree.h"

namespace tessera {
namespace {

enum class Along { kNone, kFirst, kSecond };

Along along_of(ParallelDim dim, const char* who) {
  if (!dim) return Along::kNone;
  if (*dim == 0) return Along::kFirst;
  if (*dim == 1 || *dim == -1) return Along::kSecond;
  throw std::invalid_argument(fmt::format("{}: dim {}; it is 0, 1, -1 or none", who, *dim));
}

EmbeddingCut embedding_cut(ParallelDim dim, const char* who) {
  switch (along_of(dim, who)) {
    case Along::kFirst: return EmbeddingCut::kVocabulary;
    case Along::kSecond: return EmbeddingCut::kWidth;
    default: return EmbeddingCut::kNone;
  }
}

// Fills a weight as torch::nn::Linear does.
void default_weight(const at::Tensor& weight) { torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0)); }

void default_bias(const at::Tensor& bias, int64_t in_features) {
  const c10::AutoGradMode none(false);
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));
  torch::nn::init::uniform_(bias, -bound, bound);
}

std::string text_of(ParallelDim dim) { return dim ? std::to_string(*dim) : "none"; }

constexpr const char* kLinear = "ParallelLinear";

// Returns the placement of a dimension of the weight that `options` shards.
Placement cut_of(int64_t tensor_dim, int64_t size, const DeviceMesh& mesh, const ParallelDimOptions& options) {
  try {
    return affine_placement(tensor_dim, size, mesh.size(), 1, options.allow_uneven);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(fmt::format("{}: {}", kLinear, error.what()));
  }
}

Placement weight_cut(int64_t in_features, int64_t out_features, const DeviceMesh& mesh,
                     const ParallelDimOptions& options) {
  check_one_dimension(mesh, kLinear);
  if (in_features < 1 || out_features < 1) {
    throw std::invalid_argument(fmt::format("{}: {} input and {} output features; give at least one of each", kLinear,
                                            in_features, out_features));
  }
  switch (along_of(options.dim, kLinear)) {
    case Along::kFirst: return cut_of(1, in_features, mesh, options);
    case Along::kSecond: return cut_of(0, out_features, mesh, options);
    default: return Replicate();
  }
}

void add_styles(ParallelPlan& plan, const ModuleTree& tree, ModuleKind kind, const Style& style) {
  std::set<const void*> seen;  // a module registered under two names gets the style once
  for (const ModuleNode& node : tree) {
    if (node.kind == kind && seen.insert(node.identity).second) plan.emplace_back(pattern_of(node.path), style);
  }
}

}  // namespace

// ---- Layers -------------------------------------------------------------------------------------------------------

ParallelLinearImpl::ParallelLinearImpl(int64_t in_features, int64_t out_features, const DeviceMesh& mesh,
                                       const ParallelDimOptions& given)
    : Layer(kLinear),
      options(given),
      in_features_(in_features),
      out_features_(out_features),
      mesh_(mesh),
      weight_cut_(weight_cut(in_features, out_features, mesh, options)),
      bias_cut_(along_of(options.dim, kLinear) == Along::kSecond ? weight_cut_ : Replicate()),
      input_is_cut_(along_of(options.dim, kLinear) == Along::kFirst),
      output_is_cut_(along_of(options.dim, kLinear) == Along::kSecond) {
  weight = empty({out_features, in_features}, mesh, {weight_cut_});
  {
    const c10::AutoGradMode none(false);
    default_weight(weight);
  }
  weight.set_requires_grad(true);
  if (options.bias) {
    bias = empty({out_features}, mesh, {bias_cut_});
    default_bias(bias, in_features);
    bias.set_requires_grad(true);
  }
  reset();
}

void ParallelLinearImpl::pretty_print(std::ostream& stream) const {
  detail::LayerText text(kLinear);
  text.add("in_features", in_features_).add("out_features", out_features_).add("bias", options.bias);
  text.add("dim", text_of(options.dim)).add_unless(false, "allow_uneven", options.allow_uneven);
  stream << text.text();
}

// Returns a DTensor input redistributed to the layer's layout, and a plain input as the DTensor that it stands for.
at::Tensor ParallelLinearImpl::input_on_mesh(const at::Tensor& input) const {
  const auto wanted = [&] {
    return fmt::format("input [{}]; it has {} features in its last dimension", fmt::join(input.sizes(), ", "),
                       in_features_);
  };
  if (!input.defined()) throw std::invalid_argument(fmt::format("{}: the input is undefined", kLinear));
  const int64_t features = input.dim() == 0 ? -1 : input.size(-1);
  if (is_dtensor(input)) {
    if (!(mesh_of(input) == mesh_)) {
      throw std::invalid_argument(
          fmt::format("{}: the input is on mesh {}, the layer on {}; redistribute it with redistribute_to", kLinear,
                      mesh_of(input).to_string(), mesh_.to_string()));
    }
    if (features != in_features_) throw std::invalid_argument(fmt::format("{}: {}", kLinear, wanted()));
    return input;
  }
  if (features == in_features_) return from_local(input, mesh_, {Replicate()});
  const int64_t here = intern_spec(mesh_, {Shard(0)}, {in_features_}, input.scalar_type())->local_sizes.front();
  if (input_is_cut_ && in_features_ > 1 && features == here) {
    return from_local(input, mesh_, {Shard(input.dim() - 1)},
                      {.shape = detail::with_last(input.sizes(), in_features_)});
  }
  refuse_alone(mesh_, kLinear, input_is_cut_ ? wanted() + ", or this rank's part of them" : wanted());
}

at::Tensor ParallelLinearImpl::forward(const at::Tensor& input) {
  const at::Tensor x = input_on_mesh(input);
  const Placement last = Shard(x.dim() - 1), whole = Replicate();
  const at::Tensor weight_here =
      detail::parameter_piece(weight, {"weight", {out_features_, in_features_}, weight_cut_}, mesh_, kLinear);
  const at::Tensor bias_here =
      bias.defined() ? detail::parameter_piece(bias, {"bias", {out_features_}, bias_cut_}, mesh_, kLinear) : bias;
  const at::Tensor here = to_local(redistribute(x, {input_is_cut_ ? last : whole}));
  const at::Tensor output = parallel_linear(here, weight_here, bias_here, options.dim, mesh_);
  return from_local(output, mesh_, {output_is_cut_ ? last : whole},
                    {.shape = detail::with_last(x.sizes(), out_features_)});
}

ParallelEmbedding parallel_embedding_layer(ParallelEmbeddingOptions options, ParallelDim dim, const DeviceMesh& mesh) {
  if (!options.init_method) options.init_method = [](const at::Tensor& table) { torch::nn::init::normal_(table); };
  options.cut = embedding_cut(dim, "parallel_embedding_layer");
  return ParallelEmbedding(options, mesh);
}

std::optional<at::Reduction::Reduction> legacy_reduction(std::optional<bool> size_average, std::optional<bool> reduce) {
  if (!size_average && !reduce) return std::nullopt;
  if (!reduce.value_or(true)) return at::Reduction::None;
  return size_average.value_or(true) ? at::Reduction::Mean : at::Reduction::Sum;
}

at::Tensor parallel_cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                  const ParallelCrossEntropyOptions& options) {
  const ImplicitReplication plain_targets(is_dtensor(input) || ImplicitReplication::enabled());
  const detail::Explicit asked_for;
  const auto weight = options.weight.defined() ? std::make_optional(options.weight) : std::nullopt;
  const at::Tensor loss =
      at::cross_entropy_loss(input, target, weight, options.reduction, options.ignore_index, options.label_smoothing);
  return is_dtensor(loss) ? full_tensor(loss) : loss;
}

ParallelCrossEntropyLossImpl::ParallelCrossEntropyLossImpl(ParallelCrossEntropyOptions given)
    : torch::nn::Cloneable<ParallelCrossEntropyLossImpl>("ParallelCrossEntropyLoss"), options(std::move(given)) {
  reset();
}

void ParallelCrossEntropyLossImpl::reset() {
  if (options.weight.defined()) weight = register_buffer("weight", options.weight.detach());
}

at::Tensor ParallelCrossEntropyLossImpl::forward(const at::Tensor& input, const at::Tensor& target) {
  ParallelCrossEntropyOptions now = options;
  now.weight = weight;
  return parallel_cross_entropy(input, target, now);
}

void ParallelCrossEntropyLossImpl::pretty_print(std::ostream& stream) const {
  constexpr const char* kReductions[] = {"none", "mean", "sum"};
  detail::LayerText text("ParallelCrossEntropyLoss");
  text.add_unless(int64_t{-100}, "ignore_index", options.ignore_index);
  if (options.reduction != at::Reduction::Mean) text.add("reduction", kReductions[options.reduction]);
  stream << text.add_unless(0.0, "label_smoothing", options.label_smoothing).text();
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                        double label_smoothing, std::optional<int64_t> classes) {
  return sharded_cross_entropy(logits, target, mesh,
                               {.reduction = at::Reduction::None,
                                .label_smoothing = label_smoothing,
                                .smoothing = SmoothingFormula::kMegatron,
                                .classes = classes});
}

// ---- Functions ----------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kWho = "parallel_linear";

// Checks what sharded_linear does not see of a layer by rows: the bias, whole on every rank, and a DTensor input's
// mesh.
void check_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const DeviceMesh& mesh) {
  check_one_dimension(mesh, kWho);
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(fmt::format("{}: {}", kWho, why)); };
  if (is_dtensor(input) && !(mesh_of(input) == mesh)) {
    refuse(fmt::format("the input is on mesh {}, not on {}; redistribute it with redistribute_to",
                       mesh_of(input).to_string(), mesh.to_string()));
  }
  if (!bias.defined()) return;
  if (is_dtensor(bias)) refuse("the bias is a DTensor; full_tensor(bias) is the plain one");
  check_device(bias, mesh, kWho, "bias");
  if (weight.defined() && weight.dim() == 2 && bias.sizes() != weight.sizes().slice(0, 1)) {
    refuse_alone(mesh, kWho,  // only this rank may have a wrong weight
                 fmt::format("bias [{}] for weight [{}]; by rows give one element per output feature",
                             fmt::join(bias.sizes(), ", "), fmt::join(weight.sizes(), ", ")));
  }
}

}  // namespace

at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, ParallelDim dim,
                           const DeviceMesh& mesh) {
  switch (along_of(dim, "parallel_linear")) {
    case Along::kNone: return sharded_linear(input, weight, bias, mesh, {});
    case Along::kSecond: return sharded_linear(input, weight, bias, mesh, {.reduce_input_gradient = true});
    default: break;
  }
  check_rows(input, weight, bias, mesh);
  const at::Tensor here = is_dtensor(input) ? to_local(redistribute(input, {Shard(input.dim() - 1)})) : input;
  return sharded_linear(here, weight, bias, mesh, {.reduce_output = true});
}

at::Tensor parallel_embedding(const at::Tensor& ids, const at::Tensor& weight, ShardedEmbeddingOptions options,
                              ParallelDim dim, const DeviceMesh& mesh) {
  options.cut = embedding_cut(dim, "parallel_embedding");
  return sharded_embedding(ids, weight, mesh, options);
}

namespace {

Placement placement_of(const at::Tensor& t, ParallelDim dim) {
  if (!dim) return Replicate();
  if (*dim >= -t.dim() && *dim < t.dim()) return Shard(*dim < 0 ? *dim + t.dim() : *dim);
  throw std::invalid_argument(fmt::format("register_parallel_dim: dim {} of a tensor of {} dimensions", *dim, t.dim()));
}

}  // namespace

at::Tensor register_parallel_dim(const at::Tensor& t, ParallelDim dim, const DeviceMesh& mesh) {
  return from_local(t, mesh, {placement_of(t, dim)});
}

std::vector<at::Tensor> register_parallel_dim(const std::vector<at::Tensor>& list, ParallelDim dim,
                                              const DeviceMesh& mesh) {
  std::vector<at::Tensor> out;
  out.reserve(list.size());
  for (const at::Tensor& t : list) out.push_back(register_parallel_dim(t, dim, mesh));
  return out;
}

RegisterParallelDimImpl::RegisterParallelDimImpl(ParallelDim dim, const DeviceMesh& mesh)
    : Layer("RegisterParallelDim"), dim(dim), mesh_(mesh) {
  check_one_dimension(mesh_, "RegisterParallelDim");
}

at::Tensor RegisterParallelDimImpl::forward(const at::Tensor& input) {
  if (!is_dtensor(input)) return register_parallel_dim(input, dim, mesh_);
  const Placement wanted = placement_of(input, dim);
  if (mesh_of(input) == mesh_ && placements_of(input) == Placements{wanted}) return input;
  throw std::invalid_argument(
      fmt::format("RegisterParallelDim: the input is {}, not cut as {} on mesh {}; redistribute it", to_string(input),
                  to_string(wanted), mesh_.to_string()));
}

void RegisterParallelDimImpl::pretty_print(std::ostream& stream) const {
  stream << detail::LayerText("RegisterParallelDim").add("dim", text_of(dim)).text();
}

ParallelDim get_parallel_dim(const at::Tensor& t) {
  if (!is_dtensor(t)) return std::nullopt;
  for (const Placement& each : placements_of(t)) {
    if (each.is_shard()) return each.tensor_dim();
  }
  return std::nullopt;
}

void shard_init_(const InitMethod& method, const at::Tensor& tensor) {
  const c10::AutoGradMode none(false);
  method(tensor);
}

// ---- Converted modules --------------------------------------------------------------------------------------------

namespace detail {

ParallelPlan converted_plan(torch::nn::Module& module, const ConvertedDims& dims) {
  const ModuleTree tree = tree_of(module);
  ParallelPlan plan;
  switch (along_of(dims.linear, "convert_parallel_linear")) {
    case Along::kSecond: add_styles(plan, tree, ModuleKind::kLinear, ColwiseParallel()); break;
    case Along::kFirst:
      add_styles(plan, tree, ModuleKind::kLinear, RowwiseParallel({.input_layouts = Replicate()}));
      break;
    case Along::kNone: break;
  }
  switch (along_of(dims.embedding, "convert_parallel_embedding")) {
    case Along::kSecond:
      add_styles(plan, tree, ModuleKind::kEmbedding, ColwiseParallel({.output_layouts = Replicate()}));
      break;
    case Along::kFirst: add_styles(plan, tree, ModuleKind::kEmbedding, RowwiseParallel()); break;
    case Along::kNone: break;
  }
  return plan;
}

ParallelizeOptions for_tensors(const DeviceMesh& mesh, ParallelizeOptions options) {
  if (mesh.ndim() == 1 && !options.tensor_dim && !options.data_dims) options.tensor_dim = 0;
  return options;
}

}  // namespace detail

}  // namespace tessera

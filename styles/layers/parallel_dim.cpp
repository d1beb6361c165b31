#include "tessera/styles/layers/parallel_dim.h"

#include <cmath>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/modes.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/ops/kernels/sharded_linear.h"
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

at::Tensor as_dtensor(const at::Tensor& t, const DeviceMesh& mesh) {
  return is_dtensor(t) ? t : from_local(t, mesh, {Replicate()});
}

// torch::nn::Linear's.
void default_weight(const at::Tensor& weight) { torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0)); }

void default_bias(const at::Tensor& bias, int64_t in_features) {
  const c10::AutoGradMode none(false);
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));
  torch::nn::init::uniform_(bias, -bound, bound);
}

template <class Options>
Options linear_options(int64_t in_features, int64_t out_features, const ParallelDimOptions& given) {
  Options options(in_features, out_features);
  options.bias = given.bias;
  options.init_method = default_weight;
  options.allow_uneven = given.allow_uneven;
  return options;
}

ParallelPlan plan_of(torch::nn::Module& module, ModuleKind kind, const Style& style) {
  ParallelPlan plan;
  std::set<const void*> seen;  // a module with two names has the style once
  for (const ModuleNode& node : tree_of(module)) {
    if (node.kind == kind && seen.insert(node.identity).second) plan.emplace_back(node.path, style);
  }
  return plan;
}

}  // namespace

// ---- layers -------------------------------------------------------------------------------------------------------

ParallelLinearImpl::ParallelLinearImpl(int64_t in_features, int64_t out_features, const DeviceMesh& mesh,
                                       const ParallelDimOptions& given)
    : torch::nn::Module("ParallelLinear"), options(given), mesh_(mesh) {
  ParallelLinearBase* made = nullptr;
  switch (along_of(options.dim, "ParallelLinear")) {
    case Along::kSecond:
      column_ = std::make_shared<ColumnParallelLinearImpl>(
          linear_options<ColumnParallelOptions>(in_features, out_features, options), mesh);
      made = column_.get();
      break;
    case Along::kFirst:
      row_ = std::make_shared<RowParallelLinearImpl>(linear_options<RowParallelOptions>(in_features, out_features, options),
                                                     mesh);
      made = row_.get();
      break;
    case Along::kNone: break;
  }
  const at::Tensor whole = made ? made->weight : empty({out_features, in_features}, mesh, {Replicate()});
  if (!made) {
    const c10::AutoGradMode none(false);
    default_weight(whole);
  }
  weight = register_parameter("weight", whole);
  if (!options.bias) return;
  bias = register_parameter("bias", made ? made->bias : empty({out_features}, mesh, {Replicate()}));
  default_bias(bias, in_features);
}

at::Tensor ParallelLinearImpl::forward(const at::Tensor& input) {
  const at::Tensor x = as_dtensor(input, mesh_);
  if (column_) return column_->forward(x);
  if (row_) return row_->forward(x);
  return at::linear(redistribute(x, {Replicate()}), weight, bias.defined() ? std::make_optional(bias) : std::nullopt);
}

ParallelEmbedding parallel_embedding_layer(ParallelEmbeddingOptions options, ParallelDim dim, const DeviceMesh& mesh) {
  options.init_method = [](const at::Tensor& table) { torch::nn::init::normal_(table); };
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

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                        double label_smoothing, std::optional<int64_t> classes) {
  return sharded_cross_entropy(logits, target, mesh,
                               {.reduction = at::Reduction::None,
                                .label_smoothing = label_smoothing,
                                .smoothing = SmoothingFormula::kMegatron,
                                .classes = classes});
}

// ---- functions ----------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kWho = "parallel_linear";

// What sharded_linear does not see of a layer cut by rows: the bias, whole on every rank, and where a DTensor lies.
void check_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const DeviceMesh& mesh) {
  check_one_dimension(mesh, kWho);
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(fmt::format("{}: {}", kWho, why)); };
  if (is_dtensor(input) && !(mesh_of(input) == mesh)) {
    refuse(fmt::format("the input lies on mesh {}, not on {}; redistribute_to brings it there", mesh_of(input).to_string(),
                       mesh.to_string()));
  }
  if (!bias.defined()) return;
  if (is_dtensor(bias)) refuse("the bias is a DTensor; full_tensor(bias) is the plain one");
  check_device(bias, mesh, kWho, "bias");
  if (weight.defined() && weight.dim() == 2 && bias.sizes() != weight.sizes().slice(0, 1)) {
    refuse_alone(mesh, kWho,  // the weight is this rank's
                 fmt::format("bias [{}] for weight [{}]; by rows it has one element an output",
                             fmt::join(bias.sizes(), ", "), fmt::join(weight.sizes(), ", ")));
  }
}

}  // namespace

at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, ParallelDim dim,
                           const DeviceMesh& mesh) {
  switch (along_of(dim, "parallel_linear")) {
    case Along::kNone: return at::linear(input, weight, bias.defined() ? std::make_optional(bias) : std::nullopt);
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

at::Tensor register_parallel_dim(const at::Tensor& t, ParallelDim dim, const DeviceMesh& mesh) {
  if (!dim) return from_local(t, mesh, {Replicate()});
  if (*dim < -t.dim() || *dim >= t.dim()) {
    throw std::invalid_argument(fmt::format("register_parallel_dim: dim {} of a tensor of {} dimensions", *dim, t.dim()));
  }
  return from_local(t, mesh, {Shard(*dim < 0 ? *dim + t.dim() : *dim)});
}

std::vector<at::Tensor> register_parallel_dim(const std::vector<at::Tensor>& list, ParallelDim dim, const DeviceMesh& mesh) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& t : list) out.push_back(register_parallel_dim(t, dim, mesh));
  return out;
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

// ---- converted modules --------------------------------------------------------------------------------------------

namespace detail {

ParallelPlan linear_plan(torch::nn::Module& module, ParallelDim dim) {
  switch (along_of(dim, "convert_parallel_linear")) {
    case Along::kSecond: return plan_of(module, ModuleKind::kLinear, ColwiseParallel());
    case Along::kFirst: return plan_of(module, ModuleKind::kLinear, RowwiseParallel({.input_layouts = Replicate()}));
    default: return {};
  }
}

ParallelPlan embedding_plan(torch::nn::Module& module, ParallelDim dim) {
  switch (along_of(dim, "convert_parallel_embedding")) {
    case Along::kSecond: return plan_of(module, ModuleKind::kEmbedding, ColwiseParallel({.output_layouts = Replicate()}));
    case Along::kFirst: return plan_of(module, ModuleKind::kEmbedding, RowwiseParallel());
    default: return {};
  }
}

}  // namespace detail

}  // namespace tessera

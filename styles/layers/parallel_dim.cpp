#include "tessera/styles/layers/parallel_dim.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/movedim.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/mappings.h"
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
  for (const ModuleNode& node : tree_of(module)) {
    if (node.kind == kind) plan.emplace_back(node.path, style);
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
  const Along along = along_of(dim, "parallel_embedding_layer");
  options.cut = along == Along::kFirst ? EmbeddingCut::kVocabulary : EmbeddingCut::kWidth;
  if (along != Along::kNone) return ParallelEmbedding(options, mesh);
  throw std::invalid_argument(
      "parallel_embedding_layer: no dim; a table that every rank has is torch::nn::Embedding, under parallelize_module a "
      "DTensor");
}

std::optional<at::Reduction::Reduction> legacy_reduction(std::optional<bool> size_average, std::optional<bool> reduce) {
  if (!size_average && !reduce) return std::nullopt;
  if (!reduce.value_or(true)) return at::Reduction::None;
  return size_average.value_or(true) ? at::Reduction::Mean : at::Reduction::Sum;
}

at::Tensor parallel_cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                  const ParallelCrossEntropyOptions& options) {
  const int64_t classes = input.dim() == 1 ? 0 : 1;
  if (get_parallel_dim(input) != ParallelDim(classes) || mesh_of(input).ndim() != 1 ||
      !placements_of(input)[0].is_chunks()) {
    const auto weight = options.weight.defined() ? std::make_optional(options.weight) : std::nullopt;
    return at::cross_entropy_loss(input, target, weight, options.reduction, options.ignore_index, options.label_smoothing);
  }
  const at::Tensor last = input.dim() > 2 ? at::movedim(input, 1, -1) : input;
  const auto plain = [](const at::Tensor& t) { return t.defined() && is_dtensor(t) ? full_tensor(t) : t; };
  return sharded_cross_entropy(to_local(last), plain(target), mesh_of(input),
                               {.weight = plain(options.weight),
                                .ignore_index = options.ignore_index,
                                .reduction = options.reduction,
                                .label_smoothing = options.label_smoothing,
                                .classes = input.size(classes)});
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                        double label_smoothing) {
  return sharded_cross_entropy(
      logits, target, mesh,
      {.reduction = at::Reduction::None, .label_smoothing = label_smoothing, .smoothing = SmoothingFormula::kMegatron});
}

// ---- functions ----------------------------------------------------------------------------------------------------

at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, ParallelDim dim,
                           const DeviceMesh& mesh) {
  switch (along_of(dim, "parallel_linear")) {
    case Along::kNone: return at::linear(input, weight, bias.defined() ? std::make_optional(bias) : std::nullopt);
    case Along::kSecond: return sharded_linear(input, weight, bias, mesh, {.reduce_input_gradient = true});
    default: break;
  }
  const at::Tensor here = is_dtensor(input) ? to_local(redistribute(input, {Shard(input.dim() - 1)})) : input;
  const at::Tensor sum = reduce_from_region(sharded_linear(here, weight, {}, mesh), mesh);
  return bias.defined() ? sum.add(bias) : sum;
}

at::Tensor parallel_embedding(const at::Tensor& ids, const at::Tensor& weight, ShardedEmbeddingOptions options,
                              ParallelDim dim, const DeviceMesh& mesh) {
  const Along along = along_of(dim, "parallel_embedding");
  if (along == Along::kNone) {
    return torch::nn::functional::embedding(ids, weight,
                                            torch::nn::functional::EmbeddingFuncOptions()
                                                .padding_idx(options.padding_idx)
                                                .max_norm(options.max_norm)
                                                .norm_type(options.norm_type)
                                                .scale_grad_by_freq(options.scale_grad_by_freq)
                                                .sparse(options.sparse));
  }
  options.cut = along == Along::kFirst ? EmbeddingCut::kVocabulary : EmbeddingCut::kWidth;
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

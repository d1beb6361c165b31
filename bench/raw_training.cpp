#include "tessera/bench/raw_training.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace tessera::bench {
namespace {

// Names the places of a block's parameters: of each weight, before its bias.
enum BlockPlace : std::size_t { kNorm1 = 0, kQ = 2, kK = 4, kV = 6, kO = 8, kNorm2 = 10, kUp = 12, kDown = 14 };
// Names the places of the parameters outside the blocks.
enum RootPlace : std::size_t { kTokens = 0, kPositions = 1, kNorm = 2, kHead = 4 };

at::Tensor piece_along(const at::Tensor& whole, int64_t dim, int64_t ranks, int64_t rank) {
  const int64_t each = whole.size(dim) / ranks;
  return whole.narrow(dim, rank * each, each);
}

Backend group_of(const DeviceMesh& mesh, const char* name) {
  return mesh.size(name) > 1 ? mesh.group(name) : Backend();
}

void sum_over(at::Tensor tensor, const Backend& group) {
  if (group == nullptr) return;
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  group->allreduce(tensors)->wait();
}

// Returns the sum of the squares of all gradients.
at::Tensor squares_of(const std::vector<at::Tensor>& parameters) {
  if (parameters.empty()) return at::zeros({1});
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& each : parameters) gradients.push_back(each.grad());
  return at::stack(at::_foreach_norm(gradients)).square().sum().view({1});
}

}  // namespace

RawTraining::RawTraining(const TrainCase& size, const DeviceMesh& mesh)
    : size_(size), dp_(group_of(mesh, "dp")), tp_(group_of(mesh, "tp")), tp_rank_(mesh.local_rank("tp")) {
  std::tie(ids_, targets_) = rows_of(size, mesh.local_rank("dp"));
  const std::vector<TrainParameter> all = all_parameters(size);
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const at::Tensor whole = first_values(size, all[i], static_cast<int64_t>(i));
    values.push_back(all[i].cut_dim < 0 ? whole : piece_along(whole, all[i].cut_dim, size.tp, tp_rank_).contiguous());
  }
  if (size.zero > 0) {
    const std::size_t per_block = block_parameters(size).size();
    std::vector<at::Tensor> root = {values[0], values[1]};
    root.insert(root.end(), values.end() - 3, values.end());
    shards_.push_back(std::make_unique<RawShards>(root, dp_));
    for (auto at = values.begin() + 2; at != values.end() - 3; at += static_cast<std::ptrdiff_t>(per_block)) {
      shards_.push_back(
          std::make_unique<RawShards>(std::vector<at::Tensor>(at, at + static_cast<std::ptrdiff_t>(per_block)), dp_));
    }
    for (const auto& each : shards_) parameters_.push_back(each->shard());
  } else {
    for (std::size_t i = 0; i < all.size(); ++i) {
      parameters_.push_back(values[i].set_requires_grad(true));
      (all[i].cut_dim < 0 ? whole_ : cut_).push_back(parameters_.back());
    }
    if (dp_ != nullptr) buckets_ = std::make_unique<RawBuckets>(parameters_, dp_);
  }
  optimizer_ = std::make_unique<torch::optim::AdamW>(
      parameters_, torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(0.1));
}

at::Tensor RawTraining::norm(const at::Tensor& x, Weights weights, std::size_t at) const {
  return at::layer_norm(x, {size_.hidden}, weights[at], weights[at + 1]);
}

at::Tensor RawTraining::embed(Weights root) const {
  if (tp_ == nullptr) return at::embedding(root[kTokens], ids_) + root[kPositions];
  const int64_t mine = root[kTokens].size(0);
  const at::Tensor here = ids_ - tp_rank_ * mine;
  const at::Tensor elsewhere = (here < 0).logical_or(here >= mine);
  const at::Tensor terms = at::embedding(root[kTokens], here.masked_fill(elsewhere, 0));
  return sum_sequence(terms.masked_fill(elsewhere.unsqueeze(2), 0), tp_) +
         piece_along(root[kPositions], 0, size_.tp, tp_rank_);
}

at::Tensor RawTraining::block(const at::Tensor& x, Weights weights) const {
  const auto linear = [&](const at::Tensor& in, std::size_t at) {
    return at::linear(in, weights[at], weights[at + 1]);
  };
  // The weight is cut by columns: each rank computes one term of the output.
  const auto row_linear = [&](const at::Tensor& in, std::size_t at) {
    return tp_ == nullptr ? linear(in, at) : sum_sequence(at::linear(in, weights[at]), tp_) + weights[at + 1];
  };
  const at::Tensor in = gather_sequence(norm(x, weights, kNorm1), tp_);
  const auto by_head = [&](std::size_t at) {
    return linear(in, at).view({in.size(0), in.size(1), size_.heads / size_.tp, -1}).transpose(1, 2);
  };
  const at::Tensor attended =
      at::scaled_dot_product_attention(by_head(kQ), by_head(kK), by_head(kV), {}, 0.0, /*is_causal=*/true);
  const at::Tensor middle = x + row_linear(attended.transpose(1, 2).flatten(2), kO);
  return middle + row_linear(at::gelu(linear(gather_sequence(norm(middle, weights, kNorm2), tp_), kUp)), kDown);
}

at::Tensor RawTraining::loss(const at::Tensor& x, Weights root) const {
  const at::Tensor logits = at::linear(gather_sequence(norm(x, root, kNorm), tp_), root[kHead]);
  return cross_entropy_of_cut(logits.flatten(0, 1), targets_.flatten(), tp_) / size_.dp;
}

double RawTraining::sum_over_dp(const at::Tensor& loss) const {
  at::Tensor sum = loss.detach().clone();
  sum_over(sum, dp_);
  return sum.item<double>();
}

// Each rank has computed the gradient of its part of the sequence for what is not cut.
void RawTraining::sum_over_tp() {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& each : whole_) flat.push_back(each.grad().flatten());
  const at::Tensor all = at::cat(flat);
  sum_over(all, tp_);
  int64_t begin = 0;
  for (const at::Tensor& each : whole_) {
    each.mutable_grad() = all.narrow(0, begin, each.numel()).view(each.sizes()).variable_data();
    begin += each.numel();
  }
}

double RawTraining::clip() {
  at::Tensor squares = squares_of(size_.zero > 0 ? parameters_ : cut_);
  sum_over(squares, size_.zero > 0 ? dp_ : tp_);
  if (size_.zero == 0) squares += squares_of(whole_);
  const double norm = std::sqrt(squares.item<double>());
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& each : parameters_) gradients.push_back(each.grad());
  at::_foreach_mul_(gradients, std::min(1.0, 1.0 / (norm + 1e-6)));
  return norm;
}

double RawTraining::step_of_pieces() {
  const Weights root_begin(parameters_.data(), 2), root_end(parameters_.end() - 3, parameters_.end());
  const std::vector<at::Tensor> root = {root_begin[0], root_begin[1], root_end[0], root_end[1], root_end[2]};
  const std::size_t per_block = block_parameters(size_).size();
  at::Tensor x = embed(root);
  for (std::size_t i = 0; i < static_cast<std::size_t>(size_.layers); ++i) {
    x = block(x, Weights(parameters_).subspan(2 + i * per_block, per_block));
  }
  const at::Tensor out = loss(x, root);
  out.backward();
  if (buckets_ != nullptr) buckets_->finish();
  if (tp_ != nullptr) sum_over_tp();
  return sum_over_dp(out);
}

// While a block computes, the next one's parameters are gathered. Those of the last block stay until its backward.
double RawTraining::step_of_shards() {
  RawShards& root = *shards_[0];
  root.finish_gather();
  shards_[1]->begin_gather();
  at::Tensor x = embed(root.parameters());
  for (std::size_t i = 1; i < shards_.size(); ++i) {
    RawShards& mine = *shards_[i];
    mine.finish_gather();
    if (i + 1 < shards_.size()) shards_[i + 1]->begin_gather();
    x = block(with_backward_call(x, [&mine] { mine.begin_reduce(); }), mine.parameters());
    x = with_backward_call(x, [this, i] {
      shards_[i]->finish_gather();
      if (i > 1) shards_[i - 1]->begin_gather();
    });
    if (i + 1 < shards_.size()) mine.free();
  }
  const at::Tensor out = loss(x, root.parameters());
  out.backward();
  root.begin_reduce();
  for (const auto& each : shards_) each->finish_reduce();
  return sum_over_dp(out);
}

TrainStep RawTraining::step() {
  optimizer_->zero_grad();
  TrainStep out{.loss = size_.zero > 0 ? step_of_shards() : step_of_pieces()};
  {
    const c10::AutoGradMode no_gradient(false);
    out.norm = clip();
  }
  optimizer_->step();
  return out;
}

}  // namespace tessera::bench

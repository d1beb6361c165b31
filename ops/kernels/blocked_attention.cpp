#include "tessera/ops/kernels/blocked_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/saved.h"

namespace tessera::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

constexpr double kNever = -std::numeric_limits<double>::infinity();

// A block of this size takes as long on the CPU as attention that holds all scores (measured with 2^18 to 2^23 scores);
// on a GPU it is enough work for the whole device.
constexpr int64_t kMostOnHost = 1 << 20;
constexpr int64_t kMostOnDevice = 1 << 24;
// A causal block has few rows, so that the keys behind them are left out, and enough for products of matrices.
constexpr int64_t kLeastCausalRows = 64;
constexpr int64_t kCausalBlocks = 8;

// Is what forward computes of a block, before it is dropped. Undefined where forward does not keep it.
struct KeptScores {
  at::Tensor softmax;
  at::Tensor drawn;
};

// Returns how many heads of `heads` a block of at most `room` takes: all, whole groups, or one.
int64_t heads_of_block(const ScoreSizes& sizes, int64_t room) {
  if (room >= sizes.heads) return sizes.heads;
  return room >= sizes.group ? room / sizes.group * sizes.group : 1;
}

// ---- one call on pieces

// Holds the operands of one call, in the type that it is computed in.
class Blockwise {
 public:
  Blockwise(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
            const DroppedAttention& options)
      : options_(options),
        type_(query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
        query_(query),
        key_(key.to(type_).contiguous()),
        value_(value.to(type_).contiguous()),
        scale_(options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))))) {
    sizes_ = {.items = query.size(0),
              .heads = query.size(1),
              .rows = query.size(2),
              .keys = key.size(2),
              .group = key.size(1) > 0 ? query.size(1) / key.size(1) : 1,
              .causal = options.causal};
    if (mask.defined()) mask_ = mask.expand({sizes_.items, sizes_.heads, sizes_.rows, sizes_.keys});
  }

  std::vector<ScoreBlock> blocks() const {
    const int64_t usual = query_.is_cpu() ? kMostOnHost : kMostOnDevice;
    return score_blocks(sizes_, options_.most > 0 ? options_.most : usual);
  }

  // Keeps the scores of a call that is one small block, which is faster than to compute and draw them again.
  at::Tensor forward(KeptScores& kept) const;
  tensor_list backward(const at::Tensor& gradient, const KeptScores& kept) const;
  tensor_list differentiable_backward(const at::Tensor& gradient) const;

 private:
  double kept_probability() const { return 1 - options_.probability; }
  at::TensorOptions like() const { return query_.options().dtype(type_); }

  // Returns the heads of keys that a block's heads use.
  Interval key_heads(const ScoreBlock& b) const {
    return {b.heads.begin / sizes_.group, (b.heads.end - 1) / sizes_.group + 1};
  }
  // Returns the block's items, heads and rows of a tensor [items, heads, rows, *], a view.
  static at::Tensor part_of(const at::Tensor& t, const ScoreBlock& b) {
    return t.slice(0, b.items.begin, b.items.end)
        .slice(1, b.heads.begin, b.heads.end)
        .slice(2, b.rows.begin, b.rows.end);
  }
  // Returns it as [items * heads of keys, heads of one group * rows, *].
  at::Tensor rows_of(const at::Tensor& t, const ScoreBlock& b) const { return as_product(part_of(t, b).to(type_), b); }
  // Returns a part of a row-major tensor [items, heads of keys, keys, *] as [items * heads of keys, keys, *], a view.
  at::Tensor keys_of(const at::Tensor& t, const ScoreBlock& b) const {
    const Interval heads = key_heads(b);
    const at::Tensor part = t.slice(0, b.items.begin, b.items.end).slice(1, heads.begin, heads.end);
    return part.flatten(0, 1).slice(1, 0, b.keys);
  }
  // Returns a product's result in the sizes of the block's scores, and back.
  at::Tensor as_scores(const at::Tensor& t, const ScoreBlock& b) const {
    return t.view({b.items.size(), b.heads.size(), b.rows.size(), t.size(2)});
  }
  at::Tensor as_product(const at::Tensor& scores, const ScoreBlock& b) const {
    const int64_t heads = key_heads(b).size(), rows = b.heads.size() / heads * b.rows.size();
    return scores.reshape({b.items.size() * heads, rows, scores.size(3)});
  }
  static void store(const at::Tensor& whole, const at::Tensor& part, const ScoreBlock& b) {
    part_of(whole, b).copy_(part);
  }

  at::Tensor softmax(const at::Tensor& scaled_rows, const ScoreBlock& b) const;
  at::Tensor draw(const ScoreBlock& b) const;

  DroppedAttention options_;
  at::ScalarType type_;
  at::Tensor query_, key_, value_, mask_;
  double scale_;
  ScoreSizes sizes_;
};

// Adds what a mask says to scores. Returns whether a row may be without a key.
bool hide(const at::Tensor& scores, const at::Tensor& mask) {
  if (!mask.defined()) return false;
  if (mask.scalar_type() == at::kBool) {
    scores.masked_fill_(mask.logical_not(), kNever);
  } else {
    scores.add_(mask);
  }
  return true;
}

// Hides the keys behind row `first` + i from row i of the scores.
void hide_later(const at::Tensor& scores, int64_t first) {
  const int64_t keys = scores.size(3);
  if (keys <= first + 1) return;
  const at::Tensor later =
      at::ones({scores.size(2), keys - first}, scores.options().dtype(at::kBool)).triu(/*diagonal=*/1);
  scores.slice(3, first, keys).masked_fill_(later, kNever);
}

at::Tensor Blockwise::softmax(const at::Tensor& scaled_rows, const ScoreBlock& b) const {
  const at::Tensor scores = as_scores(at::bmm(scaled_rows, keys_of(key_, b).transpose(1, 2)), b);
  const at::Tensor mask = mask_.defined() ? part_of(mask_, b).slice(3, 0, b.keys) : at::Tensor();
  const bool may_be_empty = hide(scores, mask);
  if (options_.causal) hide_later(scores, b.rows.begin);
  const at::Tensor out = at::_softmax(scores, -1, /*half_to_float=*/false);
  // A row that attends to nothing gives 0, as LibTorch's does.
  return may_be_empty ? out.masked_fill_(scores.amax(-1, /*keepdim=*/true).eq(kNever), 0) : out;
}

// Returns 1 for each score of a block that is kept, and 0 for the others.
at::Tensor Blockwise::draw(const ScoreBlock& b) const {
  const Spec& spec = *options_.scores;
  const auto select_part = [](const Intervals& whole, Interval part) {
    return select(whole, one_interval(part.begin, part.end));
  };
  const Tile tile = {select_part(spec.tile[0], b.items), select_part(spec.tile[1], b.heads),
                     select_part(spec.tile[2], b.rows), select_part(spec.tile[3], {0, b.keys})};
  at::Tensor out = at::empty({b.items.size(), b.heads.size(), b.rows.size(), b.keys}, like());
  draw_bernoulli(out, DrawnPart(spec.sizes, tile), options_.key, kept_probability());
  return out;
}

at::Tensor Blockwise::forward(KeptScores& kept) const {
  const std::vector<int64_t> sizes = {sizes_.items, sizes_.heads, sizes_.rows, value_.size(3)};
  at::Tensor out = at::empty_strided(sizes, attention_strides(sizes, query_), query_.options());
  if (sizes_.keys == 0) return out.zero_();
  const std::vector<ScoreBlock> all = blocks();
  for (const ScoreBlock& b : all) {
    const KeptScores of_block = {.softmax = softmax(rows_of(query_, b).mul(scale_), b), .drawn = draw(b)};
    const at::Tensor weights = of_block.softmax.mul(of_block.drawn);
    store(out, as_scores(at::bmm(as_product(weights, b), keys_of(value_, b)).div_(kept_probability()), b), b);
    if (all.size() == 1 && of_block.softmax.numel() <= kMostOnHost) {
      kept = {.softmax = of_block.softmax, .drawn = of_block.drawn.to(at::kBool)};
    }
  }
  return out;
}

// With P the softmax, D the draws over 1 - p, A = P D and G the result's gradient:
//   value's gradient = A^T G,  scores' gradient = P (D G value^T - sum over keys of A G value^T)
tensor_list Blockwise::backward(const at::Tensor& gradient, const KeptScores& kept) const {
  const at::Tensor for_query = at::zeros(query_.sizes(), query_.options());
  const at::Tensor for_key = at::zeros(key_.sizes(), like()), for_value = at::zeros(value_.sizes(), like());
  for (const ScoreBlock& b : blocks()) {
    const at::Tensor rows = rows_of(query_, b).mul(scale_), g = rows_of(gradient, b).div(kept_probability());
    const at::Tensor weights = kept.softmax.defined() ? kept.softmax : softmax(rows, b);
    const at::Tensor drawn = kept.drawn.defined() ? kept.drawn : draw(b);
    keys_of(for_value, b).baddbmm_(as_product(weights.mul(drawn), b).transpose(1, 2), g);
    const at::Tensor for_weights = as_scores(at::bmm(g, keys_of(value_, b).transpose(1, 2)), b).mul_(drawn);
    const at::Tensor for_scores =
        as_product(at::_softmax_backward_data(for_weights, weights, -1, weights.scalar_type()), b);
    keys_of(for_key, b).baddbmm_(for_scores.transpose(1, 2), rows);
    store(for_query, as_scores(at::bmm(for_scores, keys_of(key_, b)).mul_(scale_), b), b);
  }
  return {for_query, for_key.to(query_.scalar_type()), for_value.to(query_.scalar_type())};
}

// Computes the same by operators that autograd differentiates, with all scores at once.
tensor_list Blockwise::differentiable_backward(const at::Tensor& gradient) const {
  const ScoreBlock all = {
      .items = {0, sizes_.items}, .heads = {0, sizes_.heads}, .rows = {0, sizes_.rows}, .keys = sizes_.keys};
  const auto each_head = [&](const at::Tensor& t) { return t.repeat_interleave(sizes_.group, 1); };
  const auto each_key_head = [&](const at::Tensor& t) {
    return t.view({t.size(0), t.size(1) / sizes_.group, sizes_.group, t.size(2), t.size(3)}).sum(2);
  };
  const at::Tensor q = query_.to(type_), k = each_head(key_), v = each_head(value_), g = gradient.to(type_);
  at::Tensor terms = at::zeros({sizes_.items, sizes_.heads, sizes_.rows, sizes_.keys}, like());
  hide(terms, mask_);
  if (options_.causal) hide_later(terms, 0);
  const at::Tensor weights = at::_safe_softmax(at::matmul(q, k.transpose(2, 3)) * scale_ + terms, -1);
  const at::Tensor drawn = draw(all).div_(kept_probability());
  const at::Tensor for_value = at::matmul((weights * drawn).transpose(2, 3), g);
  const at::Tensor for_weights = at::matmul(g, v.transpose(2, 3)) * drawn;
  const at::Tensor for_scores = weights * (for_weights - (for_weights * weights).sum(-1, /*keepdim=*/true)) * scale_;
  const at::ScalarType given = query_.scalar_type();
  return {at::matmul(for_scores, k).to(given), each_key_head(at::matmul(for_scores.transpose(2, 3), q)).to(given),
          each_key_head(for_value).to(given)};
}

struct BlockedAttention : torch::autograd::Function<BlockedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const std::optional<at::Tensor>& given_mask,
                            const DroppedAttention& options) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor mask = given_mask.value_or(at::Tensor());
    saved<DroppedAttention>(ctx, "options") = options;
    KeptScores kept;
    at::Tensor out = Blockwise(query, key, value, mask, options).forward(kept);
    ctx->save_for_backward({query, key, value, mask, kept.softmax, kept.drawn});
    return out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const tensor_list in = ctx->get_saved_variables();
    const Blockwise call(in[0], in[1], in[2], in[3], saved<DroppedAttention>(ctx, "options"));
    tensor_list out = c10::GradMode::is_enabled() ? call.differentiable_backward(grads[0])
                                                  : call.backward(grads[0], {.softmax = in[4], .drawn = in[5]});
    out.resize(5);
    return out;
  }
};

}  // namespace

std::vector<int64_t> attention_strides(const std::vector<int64_t>& sizes, const at::Tensor& query) {
  std::vector<int64_t> strides = strides_like(sizes, query);
  return std::ranges::find(strides, 0) == strides.end() ? strides : contiguous_strides(sizes);
}

std::vector<ScoreBlock> score_blocks(const ScoreSizes& sizes, int64_t most) {
  std::vector<ScoreBlock> out;
  const int64_t scores = sizes.items * sizes.heads * sizes.rows * sizes.keys;
  if (scores == 0) return out;
  const int64_t causal_rows = std::max(kLeastCausalRows, sizes.rows / kCausalBlocks);
  const int64_t wanted = std::min(sizes.rows, sizes.causal && scores > most ? causal_rows : sizes.rows);
  const int64_t rows = std::clamp<int64_t>(most / sizes.keys, 1, wanted);
  const int64_t heads = heads_of_block(sizes, std::max<int64_t>(1, most / (rows * sizes.keys)));
  const int64_t items =
      heads == sizes.heads ? std::clamp<int64_t>(most / (rows * sizes.keys * heads), 1, sizes.items) : 1;
  for (int64_t i = 0; i < sizes.items; i += items) {
    for (int64_t h = 0; h < sizes.heads; h += heads) {
      for (int64_t r = 0; r < sizes.rows; r += rows) {
        const int64_t end = std::min(r + rows, sizes.rows);
        out.push_back({.items = {i, std::min(i + items, sizes.items)},
                       .heads = {h, std::min(h + heads, sizes.heads)},
                       .rows = {r, end},
                       .keys = sizes.causal ? std::min(sizes.keys, end) : sizes.keys});
      }
    }
  }
  return out;
}

at::Tensor blocked_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const at::Tensor& mask, const DroppedAttention& options) {
  return BlockedAttention::apply(query, key, value, mask.defined() ? std::optional(mask) : std::nullopt, options);
}

}  // namespace tessera::detail

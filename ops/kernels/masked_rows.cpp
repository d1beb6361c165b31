#include "tessera/ops/kernels/masked_rows.h"

#include <stdexcept>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/saved.h"
#include "tessera/gpu_kernels/numbers.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/mesh/core/gpu_kernels.h"
#include "tessera/ops/kernels/held_elements.h"

namespace tessera::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

std::vector<int64_t> sizes_of(const at::Tensor& weight, const at::Tensor& ids) {
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(weight.size(1));
  return sizes;
}

// Returns what a GPU looks up, or nullopt where it cannot.
std::optional<at::Tensor> looked_up_by_kernel(const at::Tensor& weight, const at::Tensor& ids, const HeldRows& rows) {
  const gpu::Kernels* const kernels = kernels_for(weight);
  if (kernels == nullptr || !ids.is_cuda()) return std::nullopt;
  const at::Tensor row_major = ids.contiguous();
  const at::Tensor out = at::empty(sizes_of(weight, ids), weight.options());
  const auto request = masked_rows_request(weight, row_major, rows, out);
  if (!request) return std::nullopt;
  start_kernel("masked_rows", weight, [&](void* stream) { return kernels->masked_rows(&*request, stream); });
  return out;
}

struct MaskedEmbedding : torch::autograd::Function<MaskedEmbedding> {
  struct Options {
    HeldRows rows;
    int64_t padding = -1;
    bool scale_by_freq = false;
  };

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& ids,
                            const Options& options) {
    saved<Options>(ctx, "options") = options;
    ctx->save_for_backward({ids});
    return masked_rows(weight, ids, options.rows);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto& [rows, padding, scale_by_freq] = saved<Options>(ctx, "options");
    return {masked_rows_gradient(grads[0], ctx->get_saved_variables()[0], rows, padding, scale_by_freq), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

void check_indices(const at::Tensor& ids, const Interval& range, const char* op, const char* things) {
  if (ids.numel() == 0) return;
  if (is_queued(ids)) {
    const at::Tensor inside = at::logical_and(ids >= range.begin, ids < range.end);
    return check_on_device(inside, fmt::format("{}: an index is outside {}", op, things).c_str());
  }
  const auto low = ids.min().item<int64_t>();
  const auto high = ids.max().item<int64_t>();
  if (low >= range.begin && high < range.end) return;
  throw std::out_of_range(fmt::format("{}: index {} is outside {} [{}, {})", op, low < range.begin ? low : high, things,
                                      range.begin, range.end));
}

std::optional<gpu::MaskedRows> masked_rows_request(const at::Tensor& weight, const at::Tensor& ids,
                                                   const HeldRows& rows, const at::Tensor& out) {
  if (rows.held.size() > 1 || !has_adjacent_columns(weight) || out.numel() == 0) return std::nullopt;
  if (ids.scalar_type() != at::kInt && ids.scalar_type() != at::kLong) return std::nullopt;
  const auto size = static_cast<int64_t>(weight.element_size());
  const Interval held = rows.held.empty() ? Interval{} : rows.held[0];
  const int word = gpu::word_bytes(gpu::address(weight.const_data_ptr()), gpu::address(out.const_data_ptr()),
                                   weight.stride(0) * size, weight.size(1) * size);
  return gpu::MaskedRows{.index = ids.scalar_type() == at::kInt ? gpu::Number::kInt : gpu::Number::kLong,
                         .word = word,
                         .ids = ids.const_data_ptr(),
                         .table = weight.const_data_ptr(),
                         .out = out.mutable_data_ptr(),
                         .count = ids.numel(),
                         .words = weight.size(1) * size / word,
                         .stride = weight.stride(0) * size / word,
                         .begin = held.begin,
                         .end = held.end,
                         .rows = rows.all};
}

at::Tensor masked_rows(const at::Tensor& weight, const at::Tensor& ids, const HeldRows& rows) {
  if (const auto found = looked_up_by_kernel(weight, ids, rows)) return *found;
  check_indices(ids, {0, rows.all}, "embedding", "the table's rows");
  if (weight.size(0) == 0) return at::zeros(sizes_of(weight, ids), weight.options());
  const at::Tensor places = places_of(ids, rows.held, -1);
  const at::Tensor elsewhere = places < 0;
  return at::embedding(weight, places.clamp_min(0)).masked_fill_(elsewhere.unsqueeze(-1), 0);
}

// Ids of other rows and of padding name one extra row, which gets nothing and is dropped.
at::Tensor masked_rows_gradient(const at::Tensor& grad, const at::Tensor& ids, const HeldRows& rows, int64_t padding,
                                bool scale_by_freq) {
  const int64_t extra = count(rows.held);
  // LibTorch's kernel for a GPU writes beside a gradient that has no columns.
  if (grad.size(-1) == 0) return at::zeros({extra, 0}, grad.options());
  at::Tensor places = places_of(ids, rows.held, extra);
  if (padding >= 0) places = places.masked_fill(ids == padding, extra);
  return at::embedding_dense_backward(grad, places, extra + 1, /*padding_idx=*/extra, scale_by_freq)
      .narrow(0, 0, extra);
}

at::Tensor masked_embedding(const at::Tensor& weight, const at::Tensor& ids, const HeldRows& rows, int64_t padding,
                            bool scale_by_freq) {
  return MaskedEmbedding::apply(
      weight, ids, MaskedEmbedding::Options{.rows = rows, .padding = padding, .scale_by_freq = scale_by_freq});
}

}  // namespace tessera::detail

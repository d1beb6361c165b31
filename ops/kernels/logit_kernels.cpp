#include "tessera/ops/kernels/logit_kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "tessera/mesh/core/gpu_kernels.h"

namespace tessera::detail {
namespace {

RowSums empty_sums(const at::Tensor& logits) {
  const auto dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor all = at::empty({3, logits.size(0)}, logits.options().dtype(dtype));
  return {.greatest = all[0], .exps = all[1], .picked = all[2]};
}

}  // namespace

std::optional<gpu::LogitSums> sums_request(const at::Tensor& logits, const at::Tensor& column, const RowSums& to) {
  const std::optional<gpu::Number> number = floating_number_of(logits.scalar_type());
  if (!number || !has_adjacent_columns(logits) || logits.numel() == 0) return std::nullopt;
  return gpu::LogitSums{.number = *number,
                        .logits = logits.const_data_ptr(),
                        .rows = logits.size(0),
                        .columns = logits.size(1),
                        .stride = logits.stride(0),
                        .column = column.const_data_ptr<int64_t>(),
                        .greatest = to.greatest.mutable_data_ptr(),
                        .exps = to.exps.mutable_data_ptr(),
                        .picked = to.picked.mutable_data_ptr()};
}

std::optional<gpu::LogitGradient> gradient_request(const at::Tensor& logits, const RowFactors& factors,
                                                   const at::Tensor& out) {
  const std::optional<gpu::Number> number = floating_number_of(logits.scalar_type());
  if (!number || !has_adjacent_columns(logits) || logits.numel() == 0) return std::nullopt;
  return gpu::LogitGradient{.number = *number,
                            .logits = logits.const_data_ptr(),
                            .out = out.mutable_data_ptr(),
                            .rows = logits.size(0),
                            .columns = logits.size(1),
                            .stride = logits.stride(0),
                            .column = factors.column.const_data_ptr<int64_t>(),
                            .greatest = factors.greatest.const_data_ptr(),
                            .on_exps = factors.on_exps.const_data_ptr(),
                            .on_column = factors.on_column.const_data_ptr(),
                            .kept = factors.kept.const_data_ptr()};
}

std::optional<RowSums> row_sums_on_gpu(const at::Tensor& logits, const at::Tensor& column) {
  const gpu::Kernels* const kernels = kernels_for(logits);
  if (kernels == nullptr) return std::nullopt;
  const RowSums out = empty_sums(logits);
  const at::Tensor columns = column.contiguous();
  const auto request = sums_request(logits, columns, out);
  if (!request) return std::nullopt;
  start_kernel("logit_sums", logits, [&](void* stream) { return kernels->logit_sums(&*request, stream); });
  return out;
}

void set_terms(const RowSums& sums, const at::Tensor& greatest, const at::Tensor& here, const at::Tensor& exps,
               const at::Tensor& picked) {
  exps.copy_(sums.exps * (sums.greatest - greatest).exp_());
  picked.copy_((sums.picked - greatest).masked_fill_(here.logical_not(), 0));
}

bool gradient_on_gpu(const at::Tensor& logits, const RowFactors& factors, const at::Tensor& out) {
  const gpu::Kernels* const kernels = kernels_for(logits);
  if (kernels == nullptr) return false;
  const RowFactors rows{.column = factors.column.contiguous(),
                        .greatest = factors.greatest.contiguous(),
                        .on_exps = factors.on_exps.contiguous(),
                        .on_column = factors.on_column.contiguous(),
                        .kept = factors.kept.contiguous()};
  const auto request = gradient_request(logits, rows, out);
  if (!request) return false;
  start_kernel("logit_gradient", logits, [&](void* stream) { return kernels->logit_gradient(&*request, stream); });
  return true;
}

}  // namespace tessera::detail

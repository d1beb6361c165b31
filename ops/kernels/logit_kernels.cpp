#include "tessera/ops/kernels/logit_kernels.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/accumulate.h>

#include "tessera/mesh/core/gpu_kernels.h"

namespace tessera::detail {
namespace {

const void* memory(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

gpu::LogitTargets targets_request(const RowTargets& targets) {
  return {.of_row = targets.of_row.const_data_ptr<int64_t>(),
          .ignored = targets.ignored,
          .classes = targets.classes,
          .begin = targets.mine.begin};
}

}  // namespace

bool takes_logits(const at::Tensor& logits) {
  const at::IntArrayRef rows = logits.sizes().slice(0, static_cast<std::size_t>(logits.dim() - 1));
  return kernels_for(logits) != nullptr && c10::multiply_integers(rows) > 0 &&
         floating_number_of(logits.scalar_type()) && has_adjacent_columns(logits);
}

gpu::LogitSums sums_request(const at::Tensor& logits, const RowTargets& targets, const RowSums& to) {
  return {.number = floating_number_of(logits.scalar_type()).value(),
          .logits = logits.const_data_ptr(),
          .rows = logits.size(0),
          .columns = logits.size(1),
          .stride = logits.stride(0),
          .targets = targets_request(targets),
          .greatest = to.greatest.mutable_data_ptr(),
          .exps = to.exps.mutable_data_ptr(),
          .picked = to.picked.mutable_data_ptr()};
}

gpu::LogitTerms terms_request(const RowSums& sums, const at::Tensor& of_all, const RowTargets& targets,
                              const at::Tensor& out) {
  return {.number = floating_number_of(out.scalar_type()).value(),
          .rows = of_all.size(0),
          .columns = targets.mine.size(),
          .targets = targets_request(targets),
          .greatest = memory(sums.greatest),
          .exps = memory(sums.exps),
          .picked = memory(sums.picked),
          .of_all = memory(of_all),
          .out = out.mutable_data_ptr()};
}

gpu::LogitLosses losses_request(const at::Tensor& sums, const at::Tensor& weight, const RowTargets& targets,
                                const at::Tensor& out) {
  return {.number = floating_number_of(out.scalar_type()).value(),
          .rows = out.size(1),
          .targets = targets_request(targets),
          .sums = memory(sums),
          .weight = memory(weight),
          .out = out.mutable_data_ptr()};
}

gpu::LogitGradient gradient_request(const at::Tensor& logits, const RowFactors& factors, const RowTargets& targets,
                                    const at::Tensor& out) {
  const bool one = factors.gradient.numel() == 1;
  return {.number = floating_number_of(logits.scalar_type()).value(),
          .logits = logits.const_data_ptr(),
          .out = out.mutable_data_ptr(),
          .rows = logits.size(0),
          .columns = logits.size(1),
          .stride = logits.stride(0),
          .targets = targets_request(targets),
          .of_all = memory(factors.of_all),
          .exps = memory(factors.exps),
          .weight = memory(factors.weight),
          .gradient = memory(factors.gradient),
          .gradient_stride = one ? 0 : factors.gradient.stride(0),
          .total = memory(factors.total)};
}

RowSums row_sums(const at::Tensor& logits, const RowTargets& targets) {
  const auto dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor all = at::empty({3, logits.size(0)}, logits.options().dtype(dtype));
  RowSums out{.greatest = all[0], .exps = all[1], .picked = all[2]};
  const gpu::LogitSums request = sums_request(logits, targets, out);
  start_kernel("logit_sums", logits, [&](void* stream) { return kernels_for(logits)->logit_sums(&request, stream); });
  return out;
}

at::Tensor row_terms(const RowSums& sums, const at::Tensor& of_all, const RowTargets& targets) {
  at::Tensor out = at::empty({2 * of_all.size(0) + 1}, of_all.options());
  const gpu::LogitTerms request = terms_request(sums, of_all, targets, out);
  start_kernel("logit_terms", out, [&](void* stream) { return kernels_for(out)->logit_terms(&request, stream); });
  return out;
}

at::Tensor row_losses(const at::Tensor& sums, const at::Tensor& weight, const RowTargets& targets) {
  at::Tensor out = at::empty({2, targets.of_row.size(0)}, sums.options());
  const gpu::LogitLosses request = losses_request(sums, weight, targets, out);
  start_kernel("logit_losses", out, [&](void* stream) { return kernels_for(out)->logit_losses(&request, stream); });
  return out;
}

at::Tensor logits_gradient(const at::Tensor& logits, const RowFactors& factors, const RowTargets& targets) {
  at::Tensor out = at::empty_like(logits, at::MemoryFormat::Contiguous);
  if (out.numel() == 0) return out;
  const gpu::LogitGradient request = gradient_request(logits, factors, targets, out);
  start_kernel("logit_gradient", out, [&](void* stream) { return kernels_for(out)->logit_gradient(&request, stream); });
  return out;
}

}  // namespace tessera::detail

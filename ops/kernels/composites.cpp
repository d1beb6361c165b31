// This file has the operators that LibTorch writes in terms of others in a way that does not suit pieces.

#include <algorithm>
#include <array>
#include <stdexcept>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_ctc_loss.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/tensor_split.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// ---- operators that the dispatcher would treat as kernels: where ranks hold pieces, LibTorch's composition runs

bool as_written(const c10::OperatorHandle& op, Stack& stack) {
  if (writes(op) || !any_spread(take_args(op, stack))) return false;
  for (const auto key :
       {c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::CompositeExplicitAutogradNonFunctional}) {
    if (!op.hasKernelForDispatchKey(key)) continue;
    op.callBoxedForDispatchKey(key, stack);
    return true;
  }
  return false;
}

constexpr std::array kNames = {"allclose",
                               "binary_cross_entropy_with_logits",
                               "cholesky_solve",
                               "dist",
                               "is_same_size",
                               "_euclidean_dist",
                               "_is_all_true",
                               "_is_any_true",
                               "_unsafe_masked_index"};

[[maybe_unused]] const bool kRegistered = [] {
  for (const char* name : kNames) register_decomposition(name, as_written);
  return true;
}();

// ---- operators that make plain tensors, the same on every rank. The caller's tensors do not count as replicated.

bool is_plain(const at::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().dim() > 0 && !is_dtensor(value.toTensor());
}

void with_own_tensors(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const Stack args = take_args(op, *stack);
  const bool any_plain = std::any_of(args.begin(), args.end(), is_plain);
  const ImplicitReplication own(!any_plain || ImplicitReplication::enabled());
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

constexpr std::array kWithOwnTensors = {"combinations",           "quantile.scalar",
                                        "quantile.scalar_out",    "nanquantile.scalar",
                                        "nanquantile.scalar_out", "fake_quantize_per_tensor_affine.tensor_qparams"};

// ---- operators that write into plain tensors that they make: they run on whole tensors, and every rank has the
// result. They are differentiable.

at::Tensor whole(const at::Tensor& t) {
  return is_dtensor(t) ? to_local(redistribute(t, Placements(placements_of(t).size(), Replicate()))) : t;
}

at::Tensor first_dtensor(const dispatch::Call& call) {
  return *std::ranges::find_if(call.tensors, [](const dispatch::TensorArg& entry) {
            return detail::is_dtensor(*entry.tensor);
          })->tensor;
}

void on_whole(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const dispatch::OpTraits traits(op);
  const at::Tensor lead = first_dtensor(dispatch::read_call(op, traits, *stack));  // throws on invalid calls
  Stack args = take_args(op, *stack);
  for (const at::IValue& value : args) {
    if (!spread(value)) continue;
    detail::implicit_communication(op.schema().name(), [&] {
      return fmt::format("; it runs on whole tensors, and {} would be gathered", to_string(lead));
    });
  }
  const DeviceMesh mesh = mesh_of(lead);
  for (at::IValue& value : args) {
    detail::replace_tensors(value, [](const at::Tensor& t, std::size_t) { return whole(t); });
  }
  op.callBoxed(args);
  dispatch::count_replicated(op.schema().name());
  give(op, *stack, from_local(args[0].toTensor(), mesh, Placements(placements_of(lead).size(), Replicate())));
}

constexpr std::array kOnWhole = {"linalg_matrix_rank",
                                 "linalg_matrix_rank.atol_rtol_float",
                                 "linalg_matrix_rank.atol_rtol_tensor",
                                 "linalg_matrix_rank.tol_tensor",
                                 "pad_sequence",
                                 "vander"};

// ---- operators that read the memory of a plain tensor

at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
                      at::IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(at::max_pool1d_with_indices(self, kernel, stride, padding, dilation, ceil_mode));
}

std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& indices_or_sections, int64_t dim) {
  if (indices_or_sections.dim() > 1 || indices_or_sections.scalar_type() != at::kLong) {
    throw std::invalid_argument(
        fmt::format("tensor_split: tensor_indices_or_sections has {} dimensions of {}; give a number or a list of Long",
                    indices_or_sections.dim(), c10::toString(indices_or_sections.scalar_type())));
  }
  const std::vector<int64_t> given = read_numbers(indices_or_sections);
  if (indices_or_sections.dim() == 0) return at::tensor_split(self, given.at(0), dim);
  return at::tensor_split(self, given, dim);
}

void check_integral(const char* name, const at::Tensor& lengths) {
  if (at::isIntegralType(lengths.scalar_type(), /*includeBool=*/false)) return;
  throw std::invalid_argument(
      fmt::format("ctc_loss: {} are of {}; give whole numbers", name, c10::toString(lengths.scalar_type())));
}

at::Tensor ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets, const at::Tensor& input_lengths,
                    const at::Tensor& target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  check_integral("input_lengths", input_lengths);
  check_integral("target_lengths", target_lengths);
  return at::ctc_loss(log_probs, targets, read_numbers(input_lengths), read_numbers(target_lengths), blank, reduction,
                      zero_infinity);
}

// LibTorch's composite moves the targets to the CPU to ask whether cuDNN can take them. This is what it computes
// elsewhere.
at::Tensor ctc_loss_of_numbers(const at::Tensor& log_probs, const at::Tensor& targets, at::IntArrayRef input_lengths,
                               at::IntArrayRef target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  const auto plain = [](const at::Tensor& t) { return t.dim() > 0 && !is_dtensor(t); };
  const ImplicitReplication own((!plain(log_probs) && !plain(targets)) || ImplicitReplication::enabled());
  const at::Tensor classes = is_dtensor(targets) ? targets.to(at::kLong) : targets.to(log_probs.device(), at::kLong);
  const bool is_batch = log_probs.dim() == 3;
  at::Tensor loss = std::get<0>(at::_ctc_loss(is_batch ? log_probs : log_probs.unsqueeze(1), classes, input_lengths,
                                              target_lengths, blank, zero_infinity));
  if (zero_infinity) loss = loss.masked_fill(loss.isinf(), 0);
  if (reduction == at::Reduction::Sum) return loss.sum();
  if (reduction != at::Reduction::Mean) return is_batch ? loss : loss.squeeze(0);
  return (loss / at::tensor(target_lengths, at::kLong).to(loss.options()).clamp_min(1)).mean();
}

// ---- an operator that writes a view by the strides of one process's memory

// Returns the positions along dimension `d`, with as many dimensions as `t` and cut as `t` is.
at::Tensor places_along(const at::Tensor& t, int64_t d) {
  std::vector<int64_t> shape(static_cast<std::size_t>(t.dim()), 1);
  shape[static_cast<std::size_t>(d)] = t.size(d);
  Placements cut = placements_of(t);
  for (Placement& p : cut) {
    if (!p.is_shard() || p.tensor_dim() != d) p = Replicate();
  }
  const at::Tensor whole = at::arange(t.size(d), at::TensorOptions(at::kLong).device(t.device())).view(shape);
  return distribute_tensor(whole, mesh_of(t), cut, kNoSource);
}

// With `wrap`, in a matrix with more rows than columns, the diagonal starts again one row below each square.
at::Tensor& fill_diagonal_(at::Tensor& self, const at::Scalar& value, bool wrap) {
  const bool square = std::ranges::all_of(self.sizes(), [&](int64_t size) { return size == self.size(0); });
  if (self.dim() < 2 || (self.dim() > 2 && !square)) {
    throw std::invalid_argument(
        fmt::format("fill_diagonal_: a tensor of sizes [{}]; give a matrix, or more dimensions of one size",
                    fmt::join(self.sizes(), ", ")));
  }
  const at::Tensor rows = places_along(self, 0);
  const bool again = wrap && self.dim() == 2;
  at::Tensor on = at::eq(again ? at::remainder(rows, self.size(1) + 1) : rows, places_along(self, 1));
  for (int64_t d = 2; d < self.dim(); ++d) on = at::logical_and(on, at::eq(rows, places_along(self, d)));
  return self.masked_fill_(on, value);
}

void register_composites(torch::Library& m) {
  for (const char* name : kWithOwnTensors) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&with_own_tensors>());
  for (const char* name : kOnWhole) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_whole>());
  m.impl("max_pool1d", max_pool1d);
  m.impl("tensor_split.tensor_indices_or_sections", tensor_split);
  m.impl("ctc_loss.IntList", ctc_loss_of_numbers);
  m.impl("ctc_loss.Tensor", ctc_loss);
  m.impl("fill_diagonal_", fill_diagonal_);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { register_composites(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { register_composites(m); }

}  // namespace
}  // namespace tessera

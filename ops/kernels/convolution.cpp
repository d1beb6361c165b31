// This file has the local kernels "convolution" and "convolution_backward", which run on pieces of channels, of groups,
// and of spatial dimensions with the rows that their windows use.

#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "tessera/ops/kernels/windows.h"

namespace tessera {
namespace {

using torch::jit::Stack;
using Rows = std::vector<WindowRows>;

// Returns a list of one number per dimension (or one for all), with `value` in the dimensions that are cut.
std::vector<int64_t> with(std::vector<int64_t> list, const Rows& rows, int64_t value) {
  if (list.size() < rows.size()) list.resize(rows.size(), list.at(0));
  for (std::size_t k = 0; k < rows.size(); ++k) list[k] = rows[k].whole ? list[k] : value;
  return list;
}

// Returns the dimensions in which rows were fetched.
Rows cut_rows(const LocalCall& call) {
  Rows out;
  for (const WindowRows& r : window_rows(call)) {
    if (!r.whole) out.push_back(r);
  }
  return out;
}

// Adjusts the arguments to the piece: the tensors already contain the padding, and `groups` is the number of groups in
// the piece.
void localize(const LocalCall& call, Stack& stack, std::size_t input) {
  const Rows rows = window_rows(call);
  for (const char* name : {"padding", "output_padding"}) {
    at::IValue& list = named(call, stack, name);
    if (!rows.empty()) list = with(list.toIntVector(), rows, 0);
  }
  at::IValue& groups = named(call, stack, "groups");
  if (groups.toInt() > 1) groups = groups.toInt() * call.inputs[input]->local_sizes[1] / call.inputs[input]->sizes[1];
}

at::Tensor zeros(const Spec& spec, const at::Tensor& like) { return at::zeros(spec.local_sizes, like.options()); }

bool any_empty(const Stack& stack, std::size_t count) {
  return std::any_of(stack.begin(), stack.begin() + static_cast<std::ptrdiff_t>(count),
                     [](const at::IValue& value) { return value.toTensor().numel() == 0; });
}

at::Tensor plus_bias(const at::Tensor& result, const at::IValue& bias) {
  if (!bias.isTensor() || !bias.toTensor().defined()) return result;
  std::vector<int64_t> shape(static_cast<std::size_t>(result.dim()), 1);
  shape[1] = -1;
  return result + bias.toTensor().view(shape);
}

// The arguments are (input, weight, bias, ...).
void convolution(const LocalCall& call, Stack& stack) {
  const at::IValue bias = stack[2];
  const Rows rows = cut_rows(call);
  if (any_empty(stack, 2) || no_rows(rows)) {
    stack = {plus_bias(zeros(*call.outputs[0], stack[0].toTensor()), bias)};
    return;
  }
  localize(call, stack, 0);
  if (!named(call, stack, "transposed").toBool()) {
    stack[0] = reframed(stack[0].toTensor(), rows, &WindowRows::wide, &WindowRows::span);
    call.op.callBoxed(stack);
    return;
  }
  // The result covers all rows that the windows span. Rows that no window uses get only the bias.
  stack[2] = rows.empty() ? bias : at::IValue();
  call.op.callBoxed(stack);
  if (rows.empty()) return;
  const at::Tensor result = reframed(stack[0].toTensor(), rows, &WindowRows::span, &WindowRows::wide);
  stack = {plus_bias(result, bias)};
}

// Returns the gradients of input and weight. The arguments are (grad, input, weight, ...).
std::pair<at::Tensor, at::Tensor> gradients(const LocalCall& call, Stack& stack) {
  const Rows rows = cut_rows(call);
  const auto zeros_of = [&](std::size_t k) {
    return call.outputs[k] == nullptr ? at::Tensor() : zeros(*call.outputs[k], stack[1].toTensor());
  };
  if (any_empty(stack, 3) || no_rows(rows)) return {zeros_of(0), zeros_of(1)};
  localize(call, stack, 1);
  const bool transposed = named(call, stack, "transposed").toBool();
  at::IValue& wide = stack[transposed ? 0 : 1];
  wide = reframed(wide.toTensor(), rows, &WindowRows::wide, &WindowRows::span);
  call.op.callBoxed(stack);
  at::Tensor of_input = stack[0].toTensor();
  if (!transposed && of_input.defined()) of_input = reframed(of_input, rows, &WindowRows::span, &WindowRows::wide);
  return {of_input, stack[1].toTensor()};
}

// The bias's gradient is the sum over the gradient rows that this rank holds, not over the fetched ones.
void convolution_backward(const LocalCall& call, Stack& stack) {
  const at::Tensor held = call.fetched != nullptr ? call.fetched->held[0] : stack[0].toTensor();
  at::Tensor of_bias;
  if (call.outputs[2] != nullptr) {
    std::vector<int64_t> dims = {0};
    for (int64_t d = 2; d < held.dim(); ++d) dims.push_back(d);
    of_bias = at::sum(held, dims);
  }
  at::IValue& mask = named(call, stack, "output_mask");
  const auto asked = mask.toBoolList();
  std::pair<at::Tensor, at::Tensor> out;
  mask = c10::List<bool>({asked.get(0), asked.get(1), false});
  if (asked.get(0) || asked.get(1)) out = gradients(call, stack);
  stack = {out.first, out.second, of_bias};
}

[[maybe_unused]] const bool kRegistered = register_local_kernel("convolution", convolution) &&
                                          register_local_kernel("convolution_backward", convolution_backward);

}  // namespace
}  // namespace tessera

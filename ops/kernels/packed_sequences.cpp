// Packs and pads sequences of different lengths for recurrent modules. LibTorch's kernels copy them into plain tensors
// that they make; here they are concatenated views, which work on DTensors. The number of sequences per step stays a
// plain tensor, as it stays on the CPU beside tensors of a GPU, since recurrent modules read it.

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

using Numbers = std::vector<int64_t>;
using Two = std::tuple<at::Tensor, at::Tensor>;

// LibTorch takes no other numbers.
void check_whole_numbers(const char* op, const char* name, const at::Tensor& numbers) {
  if (numbers.dim() == 1 && numbers.scalar_type() == at::kLong) return;
  throw std::invalid_argument(fmt::format("{}: {} is a tensor of {} dimensions of {}; give one dimension of Long", op,
                                          name, numbers.dim(), c10::toString(numbers.scalar_type())));
}

void check_lengths(const Numbers& lengths, const at::Tensor& steps) {
  const bool fit = !lengths.empty() && static_cast<int64_t>(lengths.size()) == steps.size(1) && lengths.back() > 0 &&
                   lengths.front() <= steps.size(0) && std::is_sorted(lengths.rbegin(), lengths.rend());
  if (fit) return;
  throw std::invalid_argument(fmt::format(
      "_pack_padded_sequence: lengths [{}] of {} sequences padded to {} steps; give each one a length of at least 1 "
      "and at most that, the longest first",
      fmt::join(lengths, ", "), steps.size(1), steps.size(0)));
}

// Successive steps with equally many sequences left are packed together.
Two pack(const at::Tensor& input, const at::Tensor& lengths, bool batch_first) {
  if (input.dim() < 2) {
    throw std::invalid_argument(
        fmt::format("_pack_padded_sequence: an input of {} dimensions; give steps and sequences", input.dim()));
  }
  const at::Tensor steps = batch_first ? input.transpose(0, 1) : input;
  check_whole_numbers("_pack_padded_sequence", "lengths", lengths);
  const Numbers each = read_numbers(lengths);
  check_lengths(each, steps);
  std::vector<at::Tensor> parts;
  Numbers left;
  int64_t done = 0;
  for (std::size_t i = each.size(); i-- > 0;) {
    if (each[i] == done) continue;
    const auto sequences = static_cast<int64_t>(i) + 1;
    parts.push_back(steps.narrow(0, done, each[i] - done).narrow(1, 0, sequences).flatten(0, 1));
    left.insert(left.end(), static_cast<std::size_t>(each[i] - done), sequences);
    done = each[i];
  }
  return {at::cat(parts), at::tensor(left, at::kLong)};
}

// Returns amounts for constant_pad_nd that lengthen dimension `dim` of `t` at its end.
Numbers longer(const at::Tensor& t, int64_t dim, int64_t by) {
  Numbers out(static_cast<std::size_t>(2 * (t.dim() - dim)), 0);
  out.back() = by;
  return out;
}

Two unpack(const at::Tensor& data, const at::Tensor& batch_sizes, bool batch_first, const at::Scalar& value,
           int64_t total) {
  check_whole_numbers("_pad_packed_sequence", "batch_sizes", batch_sizes);
  const Numbers left = read_numbers(batch_sizes);
  const auto longest = static_cast<int64_t>(left.size());
  if (left.empty() || (total > 0 && total < longest)) {
    throw std::invalid_argument(fmt::format(
        "_pad_packed_sequence: {} steps, and total_length {}; give at least one step, and a total_length of no fewer",
        longest, total));
  }
  if (!std::is_sorted(left.rbegin(), left.rend()) || left.back() < 0) {
    throw std::invalid_argument(
        fmt::format("_pad_packed_sequence: batch_sizes [{}]; give how many sequences have each step: no more than have "
                    "the one before",
                    fmt::join(left, ", ")));
  }
  std::vector<at::Tensor> parts;
  Numbers lengths(static_cast<std::size_t>(left.front()), 0);
  int64_t begin = 0;
  for (auto step = left.begin(); step != left.end();) {
    const auto next = std::find_if(step, left.end(), [&](int64_t n) { return n != *step; });
    const int64_t steps = next - step;
    const at::Tensor part = data.narrow(0, begin, steps * *step).unflatten(0, {steps, *step});
    parts.push_back(at::constant_pad_nd(part, longer(part, 1, left.front() - *step), value));
    for (int64_t k = 0; k < *step; ++k) lengths[static_cast<std::size_t>(k)] += steps;
    begin += steps * *step;
    step = next;
  }
  at::Tensor out = at::cat(parts);
  if (total > longest) out = at::constant_pad_nd(out, longer(out, 0, total - longest), value);
  return {batch_first ? out.transpose(0, 1) : out, at::tensor(lengths, at::kLong)};
}

// Does the same where autograd is excluded.
bool pack_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (writes(op)) return false;
  const torch::jit::Stack args = take_args(op, stack);
  if (!is_dtensor(args[0].toTensor())) return false;
  const auto [data, batch_sizes] = pack(args[0].toTensor(), args[1].toTensor(), args[2].toBool());
  give(op, stack, torch::jit::Stack{data, batch_sizes});
  return true;
}
[[maybe_unused]] const bool kRegistered = register_decomposition("_pack_padded_sequence", pack_boxed);

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  m.impl("_pack_padded_sequence", pack);
  m.impl("_pad_packed_sequence", unpack);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { m.impl("_pad_packed_sequence", unpack); }

}  // namespace
}  // namespace tessera

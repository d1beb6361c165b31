// as_strided(self, size, stride, offset) describes memory that a DTensor does not have. LibTorch's own composite
// kernels ask for the tensor itself with other strides for dimensions of size 1, by which it recognizes channels-last,
// or for frames of its last dimension, as stft does. Those are views of every piece.

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

bool same_strides(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

// Returns whether these strides address the elements of `t`, each at its place.
bool reaches_same(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (t.sizes() != sizes || strides.size() != sizes.size()) return false;
  return t.numel() == 0 || same_strides(sizes, strides, t.strides());
}

// Returns the distance between the starts of frames, if sizes and strides describe frames of the last dimension:
// [..., frames, elements of a frame].
std::optional<int64_t> hop_of_frames(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto dims = static_cast<std::size_t>(t.dim());
  if (dims == 0 || t.numel() == 0 || sizes.size() != dims + 1 || strides.size() != dims + 1) return std::nullopt;
  const std::size_t last = dims - 1;
  const int64_t step = t.strides()[last], frames = sizes[last], elements = sizes[dims];
  if (step < 1 || strides[dims] != step || strides[last] % step != 0 || frames < 1 || elements < 1) return std::nullopt;
  const int64_t hop = strides[last] / step;
  const bool fits = hop >= 1 && (frames - 1) * hop + elements <= t.sizes()[last];
  const at::IntArrayRef before = t.sizes().slice(0, last);
  const bool same = sizes.slice(0, last) == before && same_strides(before, strides, t.strides());
  return fits && same ? std::optional(hop) : std::nullopt;
}

// Returns the piece with its dimensions in the memory order that `strides` give the global tensor. A dimension of size
// 1 comes after those with smaller strides.
at::Tensor ordered_piece(const at::Tensor& local, at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<int64_t> of_piece = local.strides().vec();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) continue;
    of_piece[i] = 1;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      if (sizes[k] == 1 || strides[k] >= strides[i]) continue;
      of_piece[i] = std::max(of_piece[i], local.strides()[k] * std::max<int64_t>(local.sizes()[k], 1));
    }
  }
  return local.as_strided(local.sizes(), of_piece, local.storage_offset());
}

// Gives `t` these strides, in place. Its aliases keep theirs.
void set_strides(const at::Tensor& t, at::IntArrayRef strides) {
  if (t.strides() == strides) return;
  const detail::Meta& old = detail::meta(t);
  const Spec& spec = *old.spec;
  const SpecPtr to = intern_spec(spec.mesh, spec.placements, spec.sizes, strides, spec.dtype);
  const at::Tensor local = spec.mesh.is_member() ? ordered_piece(old.local(), spec.sizes, strides) : old.local();
  auto meta = c10::make_intrusive<detail::Meta>(local, to);
  meta->contract = old.contract;
  meta->copy = old.copy;
  meta->share_writes_of(old);
  t.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(to->sizes, to->strides);
}

void check_same(const char* op, const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                std::optional<int64_t> offset) {
  const int64_t from = offset.value_or(self.storage_offset());
  if (reaches_same(self, size, stride) && from == self.storage_offset()) return;
  throw std::invalid_argument(fmt::format(
      "{}: [{}] by strides [{}] from {} of {}, by strides [{}] from {}: a DTensor's pieces lie in other "
      "memory than one process's; use view, transpose, slice, diagonal or unfold, or call full_tensor first",
      op, fmt::join(size, ", "), fmt::join(stride, ", "), from, to_string(*detail::meta(self).spec),
      fmt::join(self.strides(), ", "), self.storage_offset()));
}

at::Tensor strided_view(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<int64_t> offset) {
  if (const auto hop = hop_of_frames(self, size, stride);
      hop && offset.value_or(self.storage_offset()) == self.storage_offset()) {
    return self.unfold(-1, size.back(), *hop).narrow(-2, 0, size[size.size() - 2]);
  }
  check_same("aten::as_strided", self, size, stride, offset);
  at::Tensor view = at::alias(self);
  set_strides(view, stride);
  return view;
}

// This is no operation to autograd, since the value stays the same.
const at::Tensor& restride(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                           std::optional<int64_t> offset) {
  check_same("aten::as_strided_", self, size, stride, offset);
  set_strides(self, stride);
  return self;
}

// Does the same where autograd is excluded.
bool boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const bool in_place = op.schema().name().ends_with('_');
  if (writes(op) && !in_place) return false;
  const torch::jit::Stack args = take_args(op, stack);
  const at::Tensor self = args[0].toTensor();
  const std::vector<int64_t> size = args[1].toIntVector(), stride = args[2].toIntVector();
  const auto offset = args[3].toOptional<int64_t>();
  if (in_place) {
    give(op, stack, restride(self, size, stride, offset));
    detail::expect_new_shape(self);
  } else {
    give(op, stack, strided_view(self, size, stride, offset));
  }
  return true;
}
[[maybe_unused]] const bool kRegistered = register_decomposition("as_strided", boxed);

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  m.impl("as_strided", strided_view);
  m.impl("as_strided_", restride);
}

}  // namespace
}  // namespace tessera

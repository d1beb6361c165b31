#pragma once

#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace tessera {

// These functions say whether a tensor's memory holds its values. With three dispatch keys it does not:
//   - ZeroTensor: zeros without memory (data_ptr() is null), which autograd's formulas make where a derivative is zero;
//   - Conjugate and Negative: views whose memory holds the conjugate or the negative of the values.

inline bool has_memory(const at::Tensor& t) { return !t.key_set().has(c10::DispatchKey::ZeroTensor); }

// Returns whether the memory holds the values themselves. Code that reads or writes data_ptr() or storage() needs this.
inline bool is_in_memory(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kOutside(
      {c10::DispatchKey::ZeroTensor, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return !t.key_set().has_any(kOutside);
}

// Says whether elements of equal index lie at equal places of the two memories. Strides of dimensions with one element
// do not count.
inline bool same_memory_order(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

namespace detail {
at::Tensor written_out(const at::Tensor& t);
}

// Returns the same values in a tensor that has memory: `t` itself unless it is a ZeroTensor. The result may still have
// the Conjugate or Negative key. `t` must be defined.
inline at::Tensor with_memory(at::Tensor t) { return has_memory(t) ? std::move(t) : detail::written_out(t); }
// Returns a tensor whose memory holds the values themselves: `t` itself where is_in_memory(t).
inline at::Tensor in_memory(at::Tensor t) { return is_in_memory(t) ? std::move(t) : detail::written_out(t); }

}  // namespace tessera

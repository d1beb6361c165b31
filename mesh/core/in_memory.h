#pragma once

#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace tessera {

// These functions say how a tensor's memory relates to its values. LibTorch keeps three things outside of memory, as
// dispatch keys: ZeroTensor is zeros that have no memory at all, which autograd's formulas make where a derivative is
// zero (data_ptr() is null); Conjugate and Negative are views whose memory holds the conjugate or the negative of the
// values.

inline bool has_memory(const at::Tensor& t) { return !t.key_set().has(c10::DispatchKey::ZeroTensor); }

// Says whether the memory holds the values as they are. Whatever reads or writes data_ptr() or storage() needs this.
inline bool is_in_memory(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kOutside(
      {c10::DispatchKey::ZeroTensor, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return !t.key_set().has_any(kOutside);
}

namespace detail {
at::Tensor written_out(const at::Tensor& t);
}

// Returns the same values with memory, perhaps conjugated or negated by a key: `t` itself unless it is a ZeroTensor.
// `t` must be defined.
inline at::Tensor with_memory(at::Tensor t) { return has_memory(t) ? std::move(t) : detail::written_out(t); }
// Returns the same values in memory as they are: `t` itself where they are so already.
inline at::Tensor in_memory(at::Tensor t) { return is_in_memory(t) ? std::move(t) : detail::written_out(t); }

}  // namespace tessera

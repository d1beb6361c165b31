#pragma once

#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

// While a ShardedInit guard lives (dtensor/deferred/sharded_init.h), factories make deferred tensors, which have no
// values yet. Every folder must refuse to communicate them, and must make the library's own tensors under NotDeferred.
// These functions are internal to the library.
namespace tessera::detail {

inline bool is_deferred(const at::Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::DeferredInit); }

// Throws std::invalid_argument if `t` has no values yet. The text names `who`, which needs them, and
// deferred_way_out().
void refuse_deferred(std::string_view who, const at::Tensor& t);
// Returns what the caller should do: end the guard's scope if one lives on this thread, else call parallelize_module.
std::string_view deferred_way_out();

// While one lives on a thread, ShardedInit is suspended there: factories make tensors with values, and nothing is
// recorded. Functions of the library hold one while they make tensors of their own; they must refuse deferred arguments
// before.
class NotDeferred {
 public:
  NotDeferred() : exclude_(c10::DispatchKey::DeferredInit) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace tessera::detail

#pragma once

#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

// What every layer must know of ShardedInit (dtensor/deferred/sharded_init.h): the library's own tensors are real while
// such a guard lives, and a tensor that was made under one has no values to communicate. The library's own.
namespace tessera::detail {

inline bool is_deferred(const at::Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::DeferredInit); }

// Throws std::invalid_argument if `t` has no values yet, naming `who` needs them, and whether the guard is still alive
// on this thread.
void refuse_deferred(std::string_view who, const at::Tensor& t);
// What to do about it: to end the guard's scope where one lives on this thread, else parallelize_module.
std::string_view deferred_way_out();

// Held by functions of the library that make tensors of their own. While one lives on a thread, ShardedInit records
// nothing there; deferred tensors must have been refused before.
class NotRecording {
 public:
  NotRecording() : exclude_(c10::DispatchKey::DeferredInit) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace tessera::detail

#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/dtensor/core/pending_pieces.h"
#include "tessera/dtensor/core/spec.h"
#include "tessera/mesh/core/in_memory.h"

// How a DTensor is made of an at::Tensor: a TensorImpl of the PrivateUse3 backend with the global sizes and strides, no
// storage, and in its BackendMeta the local tensor and the Spec. The library's own; users take dtensor.h.
namespace tessera::detail {

inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::PrivateUse3;
inline constexpr c10::DispatchKey kAutogradDTensorKey = c10::DispatchKey::AutogradPrivateUse3;

// Says that a view is a copy, since pieces had to be moved to make it, and of which tensor.
struct ViewCopy {
  const std::string* made_by = nullptr;  // the view operator; nullptr: it is no copy
  c10::VariableVersion viewed;           // Meta::writes() of the viewed tensor
  uint32_t version = 0;                  // which it had when the copy was made
};

// Invariants:
//   - writes() is one counter for all DTensors that LibTorch would have share memory: views that no piece was moved
//     for, detach(), data(), from_local() of one tensor. Every operator that writes one of them in place, or as out=,
//     raises it, in every mode.
//   - a piece that is no inference tensor carries that counter as its own version, so that whoever writes the piece
//     itself, from to_local() or before from_local(), raises it too.
//   - local() is never a ZeroTensor, which has no memory: what it was made of is written out here. It may have the
//     Conjugate or Negative key, since conj() of a DTensor is a view of it: what reads memory asks for in_memory() or
//     row_major().
struct Meta final : c10::BackendMeta {
  Meta(at::Tensor local_tensor, SpecPtr tensor_spec)
      : spec(std::move(tensor_spec)), local_(with_memory(std::move(local_tensor))) {
    count_own_writes();
  }
  // Of a Meta that clear() has emptied, and whose piece was never pending: as made anew.
  void fill(at::Tensor local_tensor, SpecPtr tensor_spec) {
    local_ = with_memory(std::move(local_tensor));
    spec = std::move(tensor_spec);
    count_own_writes();
  }
  void clear();
  // Whether its piece was pending when it was made: then it is never kept for another tensor.
  bool was_pending() const { return pending_ != nullptr; }
  // The piece that is item `item` of `pending`.
  Meta(std::shared_ptr<PendingPieces> pending, std::size_t item, SpecPtr tensor_spec)
      : spec(std::move(tensor_spec)), pending_(std::move(pending)), item_(item), awaited_(true) {
    if (c10::InferenceMode::is_enabled()) own_writes_ = c10::VariableVersion(0);  // so is the piece that will come
  }
  // detach() and friends alias: they share the local tensor.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }

  // Never requires grad. Of an asynchronous redistribution the first reader waits, from any thread.
  const at::Tensor& local() const {
    if (awaited_.load(std::memory_order_acquire)) pending_->deliver(item_, local_, awaited_);
    return local_;
  }

  const c10::VariableVersion& writes() const {
    return own_writes_.enabled() ? own_writes_ : local().unsafeGetTensorImpl()->version_counter();
  }
  // The memory that it shows has been written.
  void count_write() {
    if (own_writes_.enabled()) {
      own_writes_.bump();
    } else {
      local().unsafeGetTensorImpl()->bump_version();
    }
  }
  // It is a view of what `writes` counts the writes of.
  void share_writes(const c10::VariableVersion& writes) {
    c10::TensorImpl& piece = *local_.unsafeGetTensorImpl();
    if (piece.is_inference()) {
      own_writes_ = writes;
    } else {
      piece.set_version_counter(writes);
    }
  }

  SpecPtr spec;
  ContractPtr contract;
  ViewCopy copy;

 private:
  // LibTorch gives an inference tensor no version.
  void count_own_writes() {
    if (!local_.unsafeGetTensorImpl()->version_counter().enabled()) own_writes_ = c10::VariableVersion(0);
  }

  mutable at::Tensor local_;
  c10::VariableVersion own_writes_;  // enabled where the piece is an inference tensor alone
  const std::shared_ptr<PendingPieces> pending_;
  const std::size_t item_ = 0;
  mutable std::atomic<bool> awaited_{false};
};

inline bool is_dtensor_impl(const c10::TensorImpl* impl) {
  return impl->key_set().has_backend(c10::BackendComponent::PrivateUse3Bit);
}
inline bool is_dtensor(const at::Tensor& t) { return t.defined() && is_dtensor_impl(t.unsafeGetTensorImpl()); }
// The Meta of a DTensor; `t` must be one.
inline Meta& meta(const at::Tensor& t) { return *static_cast<Meta*>(t.unsafeGetTensorImpl()->get_backend_meta()); }

// Throws std::runtime_error if `t` is a view's copy and what it viewed has been written since: its values are old.
void check_current(const at::Tensor& t, const char* who);
// Throws std::invalid_argument if `t` is a view's copy: what is written there would not reach the viewed tensor.
void check_writable(const at::Tensor& t, const char* who);

// A DTensor of `spec` over `local`, whose sizes must be spec->local_sizes. Shares storage with `local`. Under
// InferenceMode it is an inference tensor unless `normal_in_inference`: what a view of a normal tensor is, there too.
at::Tensor wrap(at::Tensor local, SpecPtr spec, bool normal_in_inference = false);

// A DTensor of `spec` over the piece that is item `item` of `pending`.
at::Tensor wrap(std::shared_ptr<PendingPieces> pending, std::size_t item, SpecPtr spec);

// Makes an existing plain tensor a DTensor, so that every handle to it is one at once. Keeps requires_grad; drops the
// plain storage. The caller converts .grad.
void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec);
// Makes an existing DTensor what `like` is: it shares its memory, contract and all.
void convert_in_place(const at::Tensor& dtensor, const at::Tensor& like);

// Whether `local` has the sizes and dtype that `spec` says a piece has here.
inline bool lies_as(const at::Tensor& local, const Spec& spec) {
  const c10::IntArrayRef sizes = local.sizes();
  if (sizes.size() != spec.local_sizes.size() || local.scalar_type() != spec.dtype) return false;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != spec.local_sizes[i]) return false;
  }
  return true;
}

// Throws std::runtime_error if `local` has not the sizes and dtype that `spec` says: a bug of ours, found early. Other
// ranks may not have it, so the world is failed too.
void check_local(const at::Tensor& local, const Spec& spec, const char* who);

}  // namespace tessera::detail

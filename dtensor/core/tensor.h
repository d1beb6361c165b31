#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include "tessera/dtensor/core/async_pieces.h"
#include "tessera/dtensor/core/contract.h"
#include "tessera/dtensor/core/spec.h"
#include "tessera/mesh/core/in_memory.h"

// Defines what makes an at::Tensor a DTensor: a TensorImpl of the PrivateUse3 backend with the global sizes and
// strides, without a storage, whose BackendMeta holds the local tensor and the Spec. It is internal to the library;
// users include dtensor.h.
namespace tessera::detail {

inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::PrivateUse3;
inline constexpr c10::DispatchKey kAutogradDTensorKey = c10::DispatchKey::AutogradPrivateUse3;

// Counts the writes to memory that DTensors share, by two counters, since autograd must see some writes and not others.
struct WriteCounters {
  // Is the version of the DTensor and its views, which autograd compares when it reads a saved tensor. LibTorch raises
  // it for an operator that writes in place, and for one that changes a shape in place. Plain tensors of the same
  // memory have it too: what to_local() returns, and what from_local() was given and did not copy. An inference tensor
  // has none.
  c10::VariableVersion version;
  // Is raised by every operator that writes, also where LibTorch does not raise the version, such as for writes to
  // data() and to a piece of data(). It is lowered where a shape changes in place.
  c10::VariableVersion by_operators;

  // Returns a number that differs after a write that is counted.
  uint32_t sum() const { return sum(version, by_operators); }
  static uint32_t sum(const c10::VariableVersion& version, const c10::VariableVersion& by_operators) {
    return (version.enabled() ? version.current_version() : 0) + by_operators.current_version();
  }
};

// Says whether two tensors share memory, as far as their counters show it.
bool share_counter(const WriteCounters& a, const WriteCounters& b);

// Holds what copies of views that share memory have in common: how a write to one is brought to the viewed tensor, and
// the writes that they contain.
struct ViewSource {
  c10::intrusive_ptr<c10::BackendMeta> viewed = {};  // the viewed tensor's Meta; nullptr: nothing can be brought there
  at::Tensor moved = {};                             // its piece in another layout, which the copies view
  SpecPtr layout = {};                               // of `moved`
  uint32_t writes = 0;     // the sum of ViewCopy::viewed when the copy was made, or was written last
  uint32_t operators = 0;  // WriteCounters::by_operators then
  uint32_t raised = 0;     // by how much LibTorch may have raised the version since, for the copy's own write
};

// Records that a view is a copy of the viewed tensor, because its pieces had to be moved to make it. The source of a
// copy of a copy views that copy, and `viewed` counts the writes to the tensor that the first one copied.
struct ViewCopy {
  const std::string* made_by = nullptr;  // the view operator; nullptr: not a copy
  WriteCounters viewed;
  std::shared_ptr<ViewSource> source;  // nullptr: not a copy

  // Notes that the copy contains all writes that are counted by now. LibTorch may yet raise the version by `raised`.
  void set_current(uint32_t raised = 0) const;
  // Says whether nothing was written since, other than what the copy contains.
  bool is_current() const;
};

// Refers to a tensor that redistribute_shared() has made of this one, while somebody else holds it.
struct SharedRedistribution {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> result;
  uint32_t writes = 0;  // the value of Meta::writes() when the result was made
};

// Holds what a DTensor adds to its TensorImpl: the local tensor, the Spec, the contract, and the counters of writes.
//
// Invariants:
//   - A DTensor, its views that needed no communication, its detach() and its data() share their WriteCounters. So any
//     write to one of them, in every mode, changes writes(), and so does a write to a piece that to_local() returned or
//     to the plain tensor that from_local() was given, where LibTorch counts it. Several from_local() of one tensor
//     share the version alone: what one writes through data() the others do not see.
//   - The version is that of the TensorImpl, except for data() and its views, and after set_data(): there LibTorch
//     gives the TensorImpl another one. raises_version() says whether they are one.
//   - The operators' writes are counted by the version of the piece, or by a counter of this Meta's, where the piece
//     has none or from_local() has shared it.
//   - local() is never a ZeroTensor, which has no memory: the constructor writes its zeros out. It may have the
//     Conjugate or Negative key, since conj() of a DTensor is a view of it; code that reads its memory calls
//     in_memory() or row_major() first.
struct Meta final : c10::BackendMeta {
  Meta(at::Tensor local_tensor, SpecPtr tensor_spec)
      : spec(std::move(tensor_spec)), local_(with_memory(std::move(local_tensor))) {
    count_own_writes();
  }
  // Fills a Meta that clear() has emptied and that has no AsyncPieces, as the constructor does.
  void fill(at::Tensor local_tensor, SpecPtr tensor_spec) {
    local_ = with_memory(std::move(local_tensor));
    spec = std::move(tensor_spec);
    count_own_writes();
  }
  void clear();
  // Says whether AsyncPieces deliver the piece; such a Meta is never kept for another tensor.
  bool is_async() const { return async_pieces_ != nullptr; }
  // Says whether local() would wait for the piece.
  bool is_pending() const { return undelivered_.load(std::memory_order_acquire); }
  // Holds a piece that `pieces` will deliver as item `item`.
  Meta(std::shared_ptr<AsyncPieces> pieces, std::size_t item, SpecPtr tensor_spec)
      : spec(std::move(tensor_spec)), async_pieces_(std::move(pieces)), item_(item), undelivered_(true) {
    if (c10::InferenceMode::is_enabled())
      own_writes_ = c10::VariableVersion(0);  // the delivered piece will be an inference tensor too
  }
  // detach() and other aliases share the local tensor.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }

  // Returns the local tensor, which never requires grad. The first reader of an asynchronous redistribution's result
  // waits here, on any thread.
  const at::Tensor& local() const {
    if (is_pending()) async_pieces_->deliver(item_, local_, undelivered_);
    return local_;
  }

  // Sets the version, which is that of the TensorImpl.
  void set_version(const c10::VariableVersion& version) { version_ = version; }
  const c10::VariableVersion& version() const { return version_; }
  WriteCounters write_counters() const { return {.version = version_, .by_operators = writes_by_operators()}; }
  // Returns a number that differs after a write that is counted.
  uint32_t writes() const { return WriteCounters::sum(version_, writes_by_operators()); }
  // Counts an operator's write to this tensor's memory.
  void count_write() {
    if (own_writes_.enabled()) {
      own_writes_.bump();
    } else {
      local().unsafeGetTensorImpl()->bump_version();
    }
  }
  // Makes this a view of the tensor that has these counters.
  void share_writes(const WriteCounters& counters) {
    version_ = counters.version;
    share_writes_by_operators(counters.by_operators);
  }
  // Does the same as share_writes(viewed.write_counters()), and copies less.
  void share_writes_of(const Meta& viewed) {
    version_ = viewed.version_;
    share_writes_by_operators(viewed.writes_by_operators());
  }
  // Gives this the version of a plain tensor of the user's, whose memory it has. `counter` is new, and counts the
  // operators' writes.
  void share_version(const c10::VariableVersion& version, const c10::VariableVersion& counter) {
    own_writes_ = counter;
    version_ = version;
  }

  // Says whether this is a copy of the tensor that it should view (ViewCopy).
  bool is_copied_view() const { return copy.made_by != nullptr; }

  SpecPtr spec;
  ContractPtr contract;
  ViewCopy copy;
  std::optional<SharedRedistribution> shared;

 private:
  const c10::VariableVersion& writes_by_operators() const {
    return own_writes_.enabled() ? own_writes_ : local().unsafeGetTensorImpl()->version_counter();
  }
  void share_writes_by_operators(const c10::VariableVersion& counter) {
    c10::TensorImpl& piece = *local_.unsafeGetTensorImpl();
    if (piece.is_inference()) {
      own_writes_ = counter;
    } else {
      piece.set_version_counter(counter);
    }
  }
  // Gives an inference tensor a counter, since LibTorch gives it no version.
  void count_own_writes() {
    if (!local_.unsafeGetTensorImpl()->version_counter().enabled()) own_writes_ = c10::VariableVersion(0);
  }

  mutable at::Tensor local_;
  c10::VariableVersion version_;
  c10::VariableVersion own_writes_;  // enabled where the piece is an inference tensor, or after share_version()
  const std::shared_ptr<AsyncPieces> async_pieces_;
  const std::size_t item_ = 0;
  mutable std::atomic<bool> undelivered_{false};
};

inline bool is_dtensor_impl(const c10::TensorImpl* impl) {
  return impl->key_set().has_backend(c10::BackendComponent::PrivateUse3Bit);
}
inline bool is_dtensor(const at::Tensor& t) { return t.defined() && is_dtensor_impl(t.unsafeGetTensorImpl()); }
// Returns the Meta of `t`, which must be a DTensor.
inline Meta& meta(const at::Tensor& t) { return *static_cast<Meta*>(t.unsafeGetTensorImpl()->get_backend_meta()); }

// Says whether another tensor, view or saved tensor shares the memory of `t`, a DTensor, or a plain tensor that is no
// view of its own. A pending piece is new. It does not count further handles of `t` itself.
bool shares_memory(const at::Tensor& t);

// Says whether a write to `t`, a DTensor, raises the version in its WriteCounters. It does not for data(), whose writes
// autograd is not to see, nor after set_data().
bool raises_version(const at::Tensor& t);
// Says whether it raises the version in `counters`.
bool raises_version(const at::Tensor& t, const WriteCounters& counters);
// Keeps the writes() of `t` as they are although LibTorch will raise its version. The kernel of an operator that
// changes a shape in place, and so writes nothing, calls it.
void expect_new_shape(const at::Tensor& t);

// Throws std::runtime_error if `t` is a view that was copied and the viewed tensor has been written since: the values
// of `t` are old.
void check_current(const at::Tensor& t, const char* who);
// Throws std::invalid_argument if `t` is a view that was copied, and no write to it can be brought to the viewed
// tensor.
void check_writable(const at::Tensor& t, const char* who);

// Returns a DTensor of `spec` over `local`, whose sizes must be spec->local_sizes; shares storage with `local`. It is
// an inference tensor where `inference` says so; nullopt: under InferenceMode. In every mode a view is one where the
// viewed tensor is.
at::Tensor wrap(at::Tensor local, SpecPtr spec, std::optional<bool> inference = std::nullopt);

// Returns a DTensor of `spec` over the piece that `pieces` will deliver as item `item`.
at::Tensor wrap(std::shared_ptr<AsyncPieces> pieces, std::size_t item, SpecPtr spec);

// Makes a plain tensor a DTensor, so that every handle to it is a DTensor at once. Keeps requires_grad, and whether it
// is an inference tensor; frees the plain storage. The caller converts .grad.
void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec);
// Makes `dtensor` share what `like` has: sizes, strides, local tensor, Spec and contract.
void convert_in_place(const at::Tensor& dtensor, const at::Tensor& like);

// Says whether `local` has the sizes and dtype that `spec` gives this rank's piece.
inline bool is_piece_of(const at::Tensor& local, const Spec& spec) {
  const c10::IntArrayRef sizes = local.sizes();
  if (sizes.size() != spec.local_sizes.size() || local.scalar_type() != spec.dtype) return false;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != spec.local_sizes[i]) return false;
  }
  return true;
}

// Throws std::runtime_error if `local` does not have the sizes and dtype that `spec` gives this rank's piece, which is
// a bug of the library. Other ranks may not see it, so the World is failed too.
void check_local(const at::Tensor& local, const Spec& spec, const char* who);

}  // namespace tessera::detail

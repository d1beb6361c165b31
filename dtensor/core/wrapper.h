#pragma once

#include <memory>
#include <new>
#include <optional>

#include <c10/core/TensorImpl.h>

#include "tessera/dtensor/core/tensor.h"

// Defines the TensorImpl of a DTensor, and the cache of TensorImpls that each thread keeps for reuse. It is internal
// to the library; tensor.h makes DTensors.
namespace tessera::detail {

// Returns the dispatch keys of a DTensor on `device`. Autocast's key is the device's, so autocast casts a DTensor as it
// casts the pieces. An inference tensor has none of autograd's.
c10::DispatchKeySet keys_on(const c10::Device& device, bool inference = false);

// Returns the ExtraMeta of a DTensor: `meta`, and the errors thrown when its memory or storage is read.
std::unique_ptr<c10::ExtraMeta> extra_of(c10::intrusive_ptr<c10::BackendMeta> meta);

// Does what wrap() does, for a view of `viewed`: the two share their counters of writes, as LibTorch's views do. The
// view's first element is `offset` elements of the view after the first of `viewed`, in the memory of one process.
at::Tensor wrap_view(at::Tensor local, SpecPtr spec, const at::Tensor& viewed, int64_t offset);

// Returns the bytes before the first element of a DTensor in the memory of one process.
inline int64_t bytes_before(const at::Tensor& t) {
  return t.storage_offset() * static_cast<int64_t>(t.unsafeGetTensorImpl()->itemsize());
}

// Sets the storage_offset() of a view, as wrap_view() does; `bytes` are bytes_before() of the viewed DTensor.
void place_view(const at::Tensor& view, int64_t bytes, int64_t offset);

// Implements the TensorImpl of a DTensor that wrap() made. To make and free a TensorImpl takes as long as a small
// operator, so one that nobody holds any more is not destroyed: the thread that dropped the last reference keeps it,
// with its allocations, for the next DTensor of the same layout.
class Wrapper final : public c10::TensorImpl {
 public:
  // Makes an alias, as detach() and saved tensors do; it shares the Meta.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;

  // Frees the Meta, since a weak reference keeps the TensorImpl alive but not what it holds.
  void release_resources() override;

  // Keeps the wrapper for reuse; runs the destructor only for one that is not kept.
  static void operator delete(Wrapper* wrapper, std::destroying_delete_t);

 private:
  friend class SpareWrappers;
  friend at::Tensor wrap(at::Tensor local, SpecPtr spec, std::optional<bool> inference);
  friend at::Tensor wrap_view(at::Tensor local, SpecPtr spec, const at::Tensor& viewed, int64_t offset);

  Wrapper(const Spec& spec, const c10::Device& device);
  ~Wrapper() override = default;
  static void destroy(Wrapper* wrapper);
  // Returns a kept wrapper or a new one with the sizes and dtype of `spec`; the caller sets its Meta and its version
  // counter.
  static Wrapper* make_bare(const Spec& spec, const c10::Device& device);
  // Sets the Meta; reuses the kept one if there is one.
  [[gnu::always_inline]] inline void set_meta(at::Tensor&& local, SpecPtr&& spec);
  // Prepares the wrapper for reuse. Returns false if something has changed that reuse() does not set.
  bool clear();
  [[gnu::always_inline]] inline void clear_version();
  void reuse(const Spec& spec, const c10::Device& device);
  bool has_sizes_and_strides_of(const Spec& spec) const;
  bool is_held_once() const;
  Meta* meta() const;
  // Equals is_inference() for a wrapper, without asking for autograd's keys too.
  bool is_inference_tensor() const { return !key_set_.has(c10::DispatchKey::ADInplaceOrView); }
  // Sets the keys alone; the caller sets the version counter, which an inference tensor has not.
  void set_inference(bool inference);

  // Holds, while this is an alias, the Meta and the version counter that it had of its own and will use again. Nothing
  // else holds them.
  struct Own {
    c10::intrusive_ptr<c10::BackendMeta> meta;
    c10::VariableVersion version;
  };
  Own own_;
};

}  // namespace tessera::detail

#pragma once

#include <memory>
#include <new>

#include <c10/core/TensorImpl.h>

#include "tessera/dtensor/core/tensor.h"

// The TensorImpl of a DTensor, and those that a thread keeps for the next. The library's own; tensor.h makes DTensors.
namespace tessera::detail {

// Of a DTensor on `device`. Autocast is the device's: it casts a DTensor as it casts the pieces.
c10::DispatchKeySet keys_on(const c10::Device& device);

// What a DTensor holds beside its TensorImpl.
std::unique_ptr<c10::ExtraMeta> extra_of(c10::intrusive_ptr<c10::BackendMeta> meta);

// Does what wrap() does, for a view of `viewed`: the two count writes together, as LibTorch has views do.
at::Tensor wrap_view(at::Tensor local, SpecPtr spec, const at::Tensor& viewed);

// A DTensor made as one. Making a TensorImpl and freeing it takes as long as a small operator, so one that nobody holds
// any more is not destroyed: the thread that dropped it last keeps it, with all that it allocated, for the next of the
// same layout.
class Wrapper final : public c10::TensorImpl {
 public:
  // An alias, as detach() and saved tensors are: it shares the Meta.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;

  // A weak reference keeps the TensorImpl, and not what it holds.
  void release_resources() override;

  // In the place of the destructor, which runs for those that are not kept.
  static void operator delete(Wrapper* wrapper, std::destroying_delete_t);

 private:
  friend class SpareWrappers;
  friend at::Tensor wrap(at::Tensor local, SpecPtr spec, bool normal_in_inference);
  friend at::Tensor wrap_view(at::Tensor local, SpecPtr spec, const at::Tensor& viewed);

  Wrapper(const Spec& spec, const c10::Device& device);
  ~Wrapper() override = default;
  static void destroy(Wrapper* wrapper);
  // A kept one, or a new one, of the sizes and dtype of `spec`; its Meta and its version counter are still to be given.
  static Wrapper* make_bare(const Spec& spec, const c10::Device& device);
  // A Meta of them; the one that was kept, if there is one.
  [[gnu::always_inline]] inline void set_meta(at::Tensor&& local, SpecPtr&& spec);
  // To be kept: false if it is not as it was made, but for what reuse() sets.
  bool clear();
  void reuse(const Spec& spec, const c10::Device& device);
  bool lies_as(const Spec& spec) const;
  Meta* meta() const;
  // Equals is_inference() for a wrapper, without asking for autograd's keys too.
  bool is_inference_tensor() const { return !key_set_.has(c10::DispatchKey::ADInplaceOrView); }

  // What an alias does not use while it is one: empty, or a cleared Meta and a counter that nobody else has.
  struct Own {
    c10::intrusive_ptr<c10::BackendMeta> meta;
    c10::VariableVersion version;
  };
  Own own_;
};

}  // namespace tessera::detail

#include "tessera/dtensor/tensor.h"

#include <array>
#include <memory>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::detail {
namespace {

constexpr const char* kNoStorage =
    "a DTensor has no storage of its own: call full_tensor(t) for the whole value or to_local(t) for this rank's piece, and "
    "save_weights / load_weights (tessera/dtensor/io/weights.h) in the place of torch::save / torch::load";

constexpr c10::DispatchKeySet kKeys({kDTensorKey, kAutogradDTensorKey, c10::DispatchKey::ADInplaceOrView});
const c10::DispatchKeySet kCpuKeys = kKeys.add(c10::DispatchKey::AutocastCPU);
const c10::DispatchKeySet kCudaKeys = kKeys.add(c10::DispatchKey::AutocastCUDA);

// Autocast is the device's: it casts a DTensor as it casts the pieces.
c10::DispatchKeySet keys_on(const c10::Device& device) { return device.is_cuda() ? kCudaKeys : kCpuKeys; }

// Reaches the protected members that an in-place conversion must change.
struct Access : c10::TensorImpl {
  static void set_keys(c10::TensorImpl& impl, c10::DispatchKeySet keys) { impl.*(&Access::key_set_) = keys; }
  static void set_extra(c10::TensorImpl& impl, std::unique_ptr<c10::ExtraMeta> extra) {
    impl.*(&Access::extra_meta_) = std::move(extra);
  }
  static void drop_storage(c10::TensorImpl& impl) { impl.*(&Access::storage_) = c10::Storage(); }
  static void set_device(c10::TensorImpl& impl, const c10::Device& device) { impl.*(&Access::device_opt_) = device; }
};

std::unique_ptr<c10::ExtraMeta> extra_of(c10::intrusive_ptr<Meta> meta) {
  return std::make_unique<c10::ExtraMeta>(nullptr, nullptr, std::move(meta), kNoStorage, kNoStorage);
}

// Things of one kind that this thread has no use for now, kept for those to come. Outlives its thread's storage: tensors may be freed
// after it, and then nothing is kept.
template <class T, void (*Free)(T*)>
class Spares {
 public:
  ~Spares() {
    while (count_ > 0) Free(items_[--count_]);
    state() = State::kGone;
  }
  // nullptr: none is kept.
  static T* take() {
    Spares* const mine = of_this_thread();
    return mine == nullptr || mine->count_ == 0 ? nullptr : mine->items_[--mine->count_];
  }
  static void give(T* item) {
    Spares* const mine = of_this_thread();
    if (mine != nullptr && mine->count_ < mine->items_.size()) {
      mine->items_[mine->count_++] = item;
    } else {
      Free(item);
    }
  }

 private:
  enum class State : char { kAlive, kGone };
  static State& state() {
    static thread_local State value = State::kAlive;
    return value;
  }
  static Spares* of_this_thread() {
#ifdef __SANITIZE_ADDRESS__
    return nullptr;  // a use after the end is to be seen
#endif
    if (state() == State::kGone) return nullptr;
    static thread_local Spares spares;
    return &spares;
  }

  std::array<T*, 128> items_{};
  std::size_t count_ = 0;
};

void free_extra(c10::ExtraMeta* extra) { delete extra; }
void free_memory(void* memory) { ::operator delete(memory); }

// What a DTensor holds beside its TensorImpl takes four allocations, two of them for texts.
using SpareExtras = Spares<c10::ExtraMeta, free_extra>;
using SpareMemory = Spares<void, free_memory>;

void give_back(std::unique_ptr<c10::ExtraMeta> extra) {
  if (!extra->backend_meta_.defined() || !extra->backend_meta_.is_uniquely_owned()) return;
  Meta& meta = *static_cast<Meta*>(extra->backend_meta_.get());
  if (!meta.refillable() || extra->named_tensor_meta_ || extra->symbolic_shape_meta_) return;
  meta.clear();
  SpareExtras::give(extra.release());
}

// A DTensor made as one. The class is final and so all of one size.
class Wrapper final : public c10::TensorImpl {
 public:
  Wrapper(const Spec& spec, const c10::Device& device)
      : TensorImpl(keys_on(device), c10::scalarTypeToTypeMeta(spec.dtype), device) {}
  ~Wrapper() override { drop_extra(); }
  void release_resources() override {
    drop_extra();
    TensorImpl::release_resources();
  }
  static void* operator new(std::size_t size) {
    void* const spare = SpareMemory::take();
    return spare != nullptr ? spare : ::operator new(size);
  }
  static void operator delete(void* memory) { SpareMemory::give(memory); }
  // Once.
  void hold(std::unique_ptr<c10::ExtraMeta> extra) {
    const Spec& spec = *static_cast<Meta*>(extra->backend_meta_.get())->spec;
    set_sizes_and_strides(spec.sizes, spec.strides);
    set_storage_access_should_throw();
    extra_meta_ = std::move(extra);
  }

 private:
  void drop_extra() {
    if (extra_meta_) give_back(std::move(extra_meta_));
  }
};

}  // namespace

void Meta::clear() {
  spec.reset();
  local_.reset();
  contract.reset();
  if (copied_by == nullptr) return;
  copied_by = nullptr;
  viewed = c10::VariableVersion();
  viewed_version = 0;
}

at::Tensor wrap(at::Tensor local, SpecPtr spec, bool normal_in_inference) {
  const c10::Device device = local.device();
  auto impl = c10::make_intrusive<Wrapper>(*spec, device);
  if (normal_in_inference) {
    Access::set_keys(*impl, keys_on(device));
    impl->set_version_counter(c10::VariableVersion(0));
  }
  if (std::unique_ptr<c10::ExtraMeta> spare(SpareExtras::take()); spare != nullptr) {
    static_cast<Meta*>(spare->backend_meta_.get())->fill(std::move(local), std::move(spec));
    impl->hold(std::move(spare));
  } else {
    impl->hold(extra_of(c10::make_intrusive<Meta>(std::move(local), std::move(spec))));
  }
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>(std::move(impl)));
}

at::Tensor wrap(std::shared_ptr<Transit> transit, std::size_t item, SpecPtr spec) {
  const c10::Device device = spec->mesh.device();
  const Spec& of = *spec;
  auto impl = c10::make_intrusive<c10::TensorImpl>(keys_on(device), c10::scalarTypeToTypeMeta(of.dtype), device);
  impl->set_sizes_and_strides(of.sizes, of.strides);
  impl->set_storage_access_should_throw();
  Access::set_extra(*impl, extra_of(c10::make_intrusive<Meta>(std::move(transit), item, std::move(spec))));
  return at::Tensor(std::move(impl));
}

void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec) {
  c10::TensorImpl& impl = *plain.unsafeGetTensorImpl();
  Access::set_keys(impl, keys_on(local.device()));
  Access::set_device(impl, local.device());
  impl.set_sizes_and_strides(spec->sizes, spec->strides);
  Access::drop_storage(impl);
  impl.set_storage_access_should_throw();
  Access::set_extra(impl, extra_of(c10::make_intrusive<Meta>(std::move(local), std::move(spec))));
}

void check_current(const at::Tensor& t, const char* who) {
  const Meta& m = meta(t);
  if (m.copied_by == nullptr || !m.viewed.enabled() || m.viewed.current_version() == m.viewed_version) return;
  throw std::runtime_error(fmt::format(
      "{}: would read {}, a copy that {} made because the viewed tensor had to be moved; the viewed tensor has been written "
      "since, so the copy's values are old. Take the view again after the write, or clone it before",
      who, to_string(*m.spec), *m.copied_by));
}

void check_local(const at::Tensor& local, const Spec& spec, const char* who) {
  if (local.sizes() == at::IntArrayRef(spec.local_sizes) && local.scalar_type() == spec.dtype) return;
  const std::string text =
      fmt::format("{}: internal error: the local tensor is {} [{}], but {} needs [{}] here; please report it with this text",
                  who, c10::toString(local.scalar_type()), fmt::join(local.sizes(), ", "), to_string(spec),
                  fmt::join(spec.local_sizes, ", "));
  spec.mesh.world().fail(who, text);
  throw std::runtime_error(text);
}

}  // namespace tessera::detail

#include "tessera/dtensor/core/wrapper.h"

#include <array>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <fmt/format.h>

namespace tessera::detail {
namespace {

// Is thrown where a DTensor is read through a pointer. LibTorch's operator<< reads that way too: numel() elements,
// behind operators that every program calls. So no kernel can tell that it is printing, and gathering the whole value
// would need a collective that this rank alone might enter.
constexpr const char* kNoMemory =
    "a DTensor has no memory of its own, which printing (std::cout << t), accessor() and data_ptr() read: print "
    "tessera::to_string(t) for the layout and to_local(t) for this rank's piece, or full_tensor(t), which every rank "
    "calls, for the whole value; read those in the place of t";
constexpr const char* kNoStorage =
    "a DTensor has no storage of its own, which storage(), is_alias_of() and torch::save read: call to_local(t) for "
    "this rank's piece or full_tensor(t) for the whole value; to learn whether two DTensors share memory, ask their "
    "pieces: to_local(a).is_alias_of(to_local(b)); in the place of torch::save and torch::load, save_weights and "
    "load_weights of a module (tessera/dtensor/io/weights.h), save_optimizer and load_optimizer of an optimizer "
    "(tessera/dtensor/io/optimizer_state.h)";

constexpr c10::DispatchKeySet kKeys({kDTensorKey, kAutogradDTensorKey, c10::DispatchKey::ADInplaceOrView});
constexpr c10::DispatchKeySet kCpuKeys = kKeys.add(c10::DispatchKey::AutocastCPU);
constexpr c10::DispatchKeySet kCudaKeys = kKeys.add(c10::DispatchKey::AutocastCUDA);

// GCC says by a macro that it compiles for AddressSanitizer, Clang as a feature.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
constexpr bool kAddressSanitizer = false;
#endif

}  // namespace

c10::DispatchKeySet keys_on(const c10::Device& device, bool inference) {
  const c10::DispatchKeySet keys = device.is_cuda() ? kCudaKeys : kCpuKeys;
  return inference ? keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView : keys;
}

std::unique_ptr<c10::ExtraMeta> extra_of(c10::intrusive_ptr<c10::BackendMeta> meta) {
  return std::make_unique<c10::ExtraMeta>(nullptr, nullptr, std::move(meta), kNoMemory, kNoStorage);
}

void Meta::clear() {
  spec.reset();
  local_.reset();
  contract.reset();
  if (own_writes_.enabled()) version_ = std::exchange(own_writes_, c10::VariableVersion());
  if (is_copied_view()) copy = {};
  shared.reset();
}

// Returns the counter that a version refers to, or nullptr: two versions are one where it is the same.
c10::intrusive_ptr_target* counter_of(const c10::VariableVersion& version);

// Gives access to a private member, which explicit instantiation may name, since LibTorch does not say whether two
// VariableVersions are one counter.
template <auto Member>
struct CounterOf {
  friend c10::intrusive_ptr_target* counter_of(const c10::VariableVersion& version) { return (version.*Member).get(); }
};
template struct CounterOf<&c10::VariableVersion::version_counter_>;

namespace {
bool are_one(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  return a.enabled() && counter_of(a) == counter_of(b);
}
}  // namespace

bool share_counter(const WriteCounters& a, const WriteCounters& b) {
  return are_one(a.version, b.version) || are_one(a.by_operators, b.by_operators);
}

bool raises_version(const at::Tensor& t, const WriteCounters& counters) {
  return are_one(counters.version, t.unsafeGetTensorImpl()->version_counter());
}

bool raises_version(const at::Tensor& t) { return raises_version(t, meta(t).write_counters()); }

// Invariants:
//   - It holds the wrappers that this thread keeps for reuse, each cleared, in buckets by their layout's Spec.
//   - Only its own thread uses it. After the thread has destroyed it, tensors may still be freed there: they are not
//     kept.
class SpareWrappers {
 public:
  SpareWrappers() { thread_state().here = this; }
  ~SpareWrappers() {
    thread_state() = {.here = nullptr, .gone = true};
    for (Bucket& bucket : buckets_) {
      while (bucket.count > 0) Wrapper::destroy(bucket.items[--bucket.count]);
    }
  }
  SpareWrappers(const SpareWrappers&) = delete;
  SpareWrappers& operator=(const SpareWrappers&) = delete;
  // Returns nullptr if none is kept.
  static Wrapper* take(const Spec& spec) {
    SpareWrappers* const mine = of_this_thread();
    if (mine == nullptr) return nullptr;
    Bucket& bucket = mine->bucket(&spec);
    return bucket.count == 0 ? nullptr : bucket.items[--bucket.count];
  }
  // Returns false if the wrapper is not kept: the caller frees it.
  static bool give(Wrapper* wrapper) {
    const Meta* const meta = wrapper->meta();
    SpareWrappers* const mine = of_this_thread();
    if (mine == nullptr || meta == nullptr) return false;
    Bucket& bucket = mine->bucket(meta->spec.get());
    // clear() may drop the last reference to other DTensors, which are kept here first and may fill the bucket.
    if (bucket.count == bucket.items.size() || !wrapper->clear() || bucket.count == bucket.items.size()) return false;
    bucket.items[bucket.count++] = wrapper;
    return true;
  }

 private:
  struct Bucket {
    std::array<Wrapper*, 128> items{};  // a foreach of a hundred results drops a hundred at once
    std::size_t count = 0;
  };
  struct ThreadState {
    SpareWrappers* here = nullptr;
    bool gone = false;
  };
  // With this TLS model the compiler finds the variable by an offset in the thread's storage; a thread_local of a
  // shared library is otherwise found by a call. The loader then puts all thread_locals of the library into the
  // little space that it reserves for libraries opened at run time, so none of them may be large.
  static ThreadState& thread_state() {
    [[gnu::tls_model("initial-exec")]] static constinit thread_local ThreadState value;
    return value;
  }
  static SpareWrappers* of_this_thread() {
    if constexpr (kAddressSanitizer) return nullptr;  // it must see a use after free
    const ThreadState& mine = thread_state();
    return mine.here != nullptr || mine.gone ? mine.here : make();
  }
  [[gnu::noinline]] static SpareWrappers* make() {
    static thread_local const auto spares = std::make_unique<SpareWrappers>();
    return spares.get();
  }
  Bucket& bucket(const Spec* spec) { return buckets_[(reinterpret_cast<std::uintptr_t>(spec) / 64) % buckets_.size()]; }

  std::array<Bucket, 16> buckets_;
};

Wrapper::Wrapper(const Spec& spec, const c10::Device& device)
    : TensorImpl(keys_on(device), c10::scalarTypeToTypeMeta(spec.dtype), device) {
  set_sizes_and_strides(spec.sizes, spec.strides);
  set_storage_access_should_throw();
}

Meta* Wrapper::meta() const { return extra_meta_ ? static_cast<Meta*>(extra_meta_->backend_meta_.get()) : nullptr; }

inline void Wrapper::set_meta(at::Tensor&& local, SpecPtr&& spec) {
  if (Meta* const kept = meta()) {
    kept->fill(std::move(local), std::move(spec));
    return;
  }
  auto made = c10::make_intrusive<Meta>(std::move(local), std::move(spec));
  if (extra_meta_) {
    extra_meta_->backend_meta_ = std::move(made);
  } else {
    extra_meta_ = extra_of(std::move(made));
  }
}

void Wrapper::release_resources() {
  extra_meta_.reset();
  TensorImpl::release_resources();
}

void Wrapper::destroy(Wrapper* wrapper) {
  wrapper->~Wrapper();
  ::operator delete(wrapper);
}

void Wrapper::operator delete(Wrapper* wrapper, std::destroying_delete_t) {
  if (!SpareWrappers::give(wrapper)) destroy(wrapper);
}

// Keeps a counter, set to 0, if nobody else holds it.
inline void Wrapper::clear_version() {
  Meta* const kept = meta();
  if (kept != nullptr && counter_of(kept->version()) != counter_of(version_counter_)) {
    version_counter_ = kept->version();
  }
  const uint32_t held_here = kept == nullptr ? 1 : 2;
  c10::intrusive_ptr_target* const counter = counter_of(version_counter_);
  if (counter == nullptr || c10::raw::intrusive_ptr::use_count(counter) != held_here) {
    version_counter_ = c10::VariableVersion();
    if (kept != nullptr) kept->set_version(version_counter_);
  } else if (version_counter_.current_version() != 0) {
    version_counter_.set_version(0);
  }
}

bool Wrapper::clear() {
  if (is_wrapped_number_ || !storage_access_should_throw_ || has_symbolic_sizes_strides_ ||
      extra_meta_->named_tensor_meta_ || extra_meta_->symbolic_shape_meta_ || pyobj_slot_.load_pyobj() != nullptr) {
    return false;
  }
  set_autograd_meta(nullptr);
  storage_offset_ = 0;
  if (own_.meta) {
    extra_meta_->backend_meta_ = std::move(own_.meta);
  } else if (!extra_meta_->backend_meta_.is_uniquely_owned() || meta()->is_async()) {
    extra_meta_->backend_meta_.reset();
  } else {
    meta()->clear();
  }
  if (own_.version.enabled()) version_counter_ = std::exchange(own_.version, c10::VariableVersion());
  clear_version();
  return true;
}

void Wrapper::reuse(const Spec& spec, const c10::Device& device) {
  key_set_ = keys_on(device, c10::InferenceMode::is_enabled());
  data_type_ = c10::scalarTypeToTypeMeta(spec.dtype);
  device_opt_ = device;
  allow_tensor_metadata_change_ = true;
  if (!has_sizes_and_strides_of(spec)) set_sizes_and_strides(spec.sizes, spec.strides);
}

bool Wrapper::has_sizes_and_strides_of(const Spec& spec) const {
  const std::size_t dims = spec.sizes.size();
  if (sizes_and_strides_.size() != dims) return false;
  const int64_t* const sizes = sizes_and_strides_.sizes_data();
  const int64_t* const strides = sizes_and_strides_.strides_data();
  for (std::size_t i = 0; i < dims; ++i) {
    if (sizes[i] != spec.sizes[i] || strides[i] != spec.strides[i]) return false;
  }
  return true;
}

Wrapper* Wrapper::make_bare(const Spec& spec, const c10::Device& device) {
  Wrapper* const spare = SpareWrappers::take(spec);
  if (spare == nullptr) return ::new Wrapper(spec, device);
  spare->reuse(spec, device);
  return spare;
}

void Wrapper::set_inference(bool inference) { key_set_ = keys_on(*device_opt_, inference); }

at::Tensor wrap(at::Tensor local, SpecPtr spec, std::optional<bool> inference) {
  Wrapper* const made = Wrapper::make_bare(*spec, local.device());
  auto out = c10::intrusive_ptr<c10::TensorImpl>::unsafe_steal_from_new(made);
  if (inference) made->set_inference(*inference);
  if (made->is_inference_tensor()) {
    made->version_counter_ = c10::VariableVersion();
  } else if (!made->version_counter_.enabled()) {
    made->version_counter_ = c10::VariableVersion(0);
  }
  made->set_meta(std::move(local), std::move(spec));
  Meta& meta = *made->meta();
  if (counter_of(meta.version()) != counter_of(made->version_counter_)) meta.set_version(made->version_counter_);
  return at::Tensor(std::move(out));
}

void place_view(const at::Tensor& view, int64_t bytes, int64_t offset) {
  if (bytes == 0 && offset == 0) return;
  c10::TensorImpl& impl = *view.unsafeGetTensorImpl();
  const auto size = static_cast<int64_t>(impl.itemsize());
  if (bytes % size != 0) {
    throw std::invalid_argument(fmt::format(
        "view as {}: the viewed DTensor begins {} bytes into its memory, which is no multiple of the {} bytes that an "
        "element of the view takes; call clone() on it and view the copy",
        impl.dtype().name(), bytes, size));
  }
  impl.set_storage_offset(bytes / size + offset);
}

at::Tensor wrap_view(at::Tensor local, SpecPtr spec, const at::Tensor& viewed, int64_t offset) {
  const c10::VariableVersion& version = viewed.unsafeGetTensorImpl()->version_counter();
  Wrapper* const made = Wrapper::make_bare(*spec, local.device());
  auto out = c10::intrusive_ptr<c10::TensorImpl>::unsafe_steal_from_new(made);
  // A view is an inference tensor where the viewed tensor is one, in whatever mode it is made. LibTorch would replace a
  // counter of its own by this one.
  if (made->is_inference_tensor() == version.enabled()) made->set_inference(!version.enabled());
  made->version_counter_ = version.enabled() ? version : c10::VariableVersion();
  made->set_meta(std::move(local), std::move(spec));
  made->meta()->share_writes_of(detail::meta(viewed));
  at::Tensor view(std::move(out));
  place_view(view, bytes_before(viewed), offset);
  return view;
}

// Functions such as torch::ones_like make a new TensorImpl of a result that nobody else holds, and drop the result: the
// copy's version is the only one then.
bool Wrapper::is_held_once() const {
  auto* const self = const_cast<Wrapper*>(this);
  return c10::raw::intrusive_ptr::use_count(self) == 1 && extra_meta_->backend_meta_.is_uniquely_owned();
}

c10::intrusive_ptr<c10::TensorImpl> Wrapper::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                     bool allow_metadata_change) const {
  const bool plain = !is_wrapped_number_ && !extra_meta_->named_tensor_meta_ && !extra_meta_->symbolic_shape_meta_ &&
                     c10::impl::TorchDispatchModeTLS::stack_len() == 0;
  if (!plain) return TensorImpl::shallow_copy_and_detach(std::move(version), allow_metadata_change);
  if (allow_metadata_change && !is_inference_tensor() && is_held_once()) meta()->set_version(version);
  const Spec& spec = *meta()->spec;
  Wrapper* const made = make_bare(spec, *device_opt_);
  auto out = c10::intrusive_ptr<TensorImpl>::unsafe_steal_from_new(made);
  if (made->extra_meta_) {
    made->own_ = {.meta = std::move(made->extra_meta_->backend_meta_), .version = std::move(made->version_counter_)};
    made->extra_meta_->backend_meta_ = extra_meta_->backend_meta_;
  } else {
    made->extra_meta_ = extra_of(extra_meta_->backend_meta_);
  }
  made->key_set_ = key_set_;
  made->storage_offset_ = storage_offset_;
  made->version_counter_ = made->is_inference() ? c10::VariableVersion() : std::move(version);
  made->allow_tensor_metadata_change_ = allow_metadata_change;
  return out;
}

c10::intrusive_ptr<c10::TensorImpl> Wrapper::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                     bool allow_metadata_change) const {
  return shallow_copy_and_detach(c10::VariableVersion(version), allow_metadata_change);
}

namespace {

// Reaches the protected members that an in-place conversion must change.
struct Access : c10::TensorImpl {
  static void set_keys(c10::TensorImpl& impl, c10::DispatchKeySet keys) { impl.*(&Access::key_set_) = keys; }
  static void set_extra(c10::TensorImpl& impl, std::unique_ptr<c10::ExtraMeta> extra) {
    impl.*(&Access::extra_meta_) = std::move(extra);
  }
  static void drop_storage(c10::TensorImpl& impl) { impl.*(&Access::storage_) = c10::Storage(); }
  static void set_device(c10::TensorImpl& impl, const c10::Device& device) { impl.*(&Access::device_opt_) = device; }
};

}  // namespace

at::Tensor wrap(std::shared_ptr<AsyncPieces> pieces, std::size_t item, SpecPtr spec) {
  const c10::Device device = spec->mesh.device();
  const Spec& of = *spec;
  auto impl = c10::make_intrusive<c10::TensorImpl>(keys_on(device), c10::scalarTypeToTypeMeta(of.dtype), device);
  impl->set_sizes_and_strides(of.sizes, of.strides);
  impl->set_storage_access_should_throw();
  auto meta = c10::make_intrusive<Meta>(std::move(pieces), item, std::move(spec));
  meta->set_version(impl->version_counter());
  Access::set_extra(*impl, extra_of(std::move(meta)));
  return at::Tensor(std::move(impl));
}

void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec) {
  c10::TensorImpl& impl = *plain.unsafeGetTensorImpl();
  Access::set_keys(impl, keys_on(local.device(), impl.is_inference()));
  Access::set_device(impl, local.device());
  impl.set_sizes_and_strides(spec->sizes, spec->strides, 0);
  Access::drop_storage(impl);
  impl.set_storage_access_should_throw();
  auto meta = c10::make_intrusive<Meta>(std::move(local), std::move(spec));
  meta->set_version(impl.version_counter());
  Access::set_extra(impl, extra_of(std::move(meta)));
}

void convert_in_place(const at::Tensor& dtensor, const at::Tensor& like) {
  c10::TensorImpl& impl = *dtensor.unsafeGetTensorImpl();
  impl.set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl.set_backend_meta(like.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

}  // namespace tessera::detail

#include "tessera/dtensor/tensor.h"

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
  static void set_extra(c10::TensorImpl& impl, c10::intrusive_ptr<Meta> meta) {
    impl.*(&Access::extra_meta_) =
        std::make_unique<c10::ExtraMeta>(nullptr, nullptr, std::move(meta), kNoStorage, kNoStorage);
  }
  static void drop_storage(c10::TensorImpl& impl) { impl.*(&Access::storage_) = c10::Storage(); }
};

c10::intrusive_ptr<c10::TensorImpl> make_impl(const Spec& spec, const c10::Device& device) {
  return c10::make_intrusive<c10::TensorImpl>(keys_on(device), c10::scalarTypeToTypeMeta(spec.dtype), device);
}

at::Tensor finished(c10::intrusive_ptr<c10::TensorImpl> impl, c10::intrusive_ptr<Meta> meta) {
  impl->set_sizes_and_strides(meta->spec->sizes, meta->spec->strides);
  impl->set_storage_access_should_throw();
  Access::set_extra(*impl, std::move(meta));
  return at::Tensor(std::move(impl));
}

}  // namespace

at::Tensor wrap(at::Tensor local, SpecPtr spec, bool normal_in_inference) {
  auto impl = make_impl(*spec, local.device());
  if (normal_in_inference) {
    Access::set_keys(*impl, keys_on(local.device()));
    impl->set_version_counter(c10::VariableVersion(0));
  }
  return finished(std::move(impl), c10::make_intrusive<Meta>(std::move(local), std::move(spec)));
}

at::Tensor wrap(std::shared_ptr<Transit> transit, std::size_t item, SpecPtr spec) {
  auto impl = make_impl(*spec, spec->mesh.device());
  return finished(std::move(impl), c10::make_intrusive<Meta>(std::move(transit), item, std::move(spec)));
}

void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec) {
  c10::TensorImpl& impl = *plain.unsafeGetTensorImpl();
  Access::set_keys(impl, keys_on(local.device()));
  impl.set_sizes_and_strides(spec->sizes, spec->strides);
  Access::drop_storage(impl);
  impl.set_storage_access_should_throw();
  Access::set_extra(impl, c10::make_intrusive<Meta>(std::move(local), std::move(spec)));
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

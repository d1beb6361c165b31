#include "tessera/dtensor/tensor.h"

#include <memory>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/wrapper.h"

namespace tessera::detail {
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

void convert_in_place(const at::Tensor& dtensor, const at::Tensor& like) {
  c10::TensorImpl& impl = *dtensor.unsafeGetTensorImpl();
  impl.set_sizes_and_strides(like.sizes(), like.strides());
  impl.set_backend_meta(like.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

void check_current(const at::Tensor& t, const char* who) {
  const Meta& m = meta(t);
  const ViewCopy& copy = m.copy;
  if (copy.made_by == nullptr || copy.viewed.current_version() == copy.version) return;
  throw std::runtime_error(fmt::format(
      "{}: would read {}, a copy that {} made because the viewed tensor had to be moved; the viewed tensor has been written "
      "since, so the copy's values are old. Take the view again after the write, or clone it before",
      who, to_string(*m.spec), *copy.made_by));
}

void check_writable(const at::Tensor& t, const char* who) {
  const Meta& m = meta(t);
  if (m.copy.made_by == nullptr) return;
  throw std::invalid_argument(fmt::format(
      "{}: would write {}, a copy that {} made because the viewed tensor had to be moved: the viewed tensor would not "
      "change. "
      "Clone the view to write the copy alone; or redistribute the viewed tensor first, so that the view needs no move",
      who, to_string(*m.spec), *m.copy.made_by));
}

void check_local(const at::Tensor& local, const Spec& spec, const char* who) {
  if (lies_as(local, spec)) return;
  const std::string text =
      fmt::format("{}: internal error: the local tensor is {} [{}], but {} needs [{}] here; please report it with this text",
                  who, c10::toString(local.scalar_type()), fmt::join(local.sizes(), ", "), to_string(spec),
                  fmt::join(spec.local_sizes, ", "));
  spec.mesh.world().fail(who, text);
  throw std::runtime_error(text);
}

}  // namespace tessera::detail

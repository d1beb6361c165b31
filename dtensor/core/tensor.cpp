#include "tessera/dtensor/core/tensor.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::detail {

void check_current(const at::Tensor& t, const char* who) {
  const Meta& m = meta(t);
  const ViewCopy& copy = m.copy;
  if (!m.is_copied_view() || copy.viewed.current_version() == copy.version) return;
  throw std::runtime_error(
      fmt::format("{}: would read {}, a copy that {} made because the viewed tensor had to be moved; the viewed tensor "
                  "has been written since, so the copy's values are old. Take the view again after the write, or "
                  "clone it before",
                  who, to_string(*m.spec), *copy.made_by));
}

void check_writable(const at::Tensor& t, const char* who) {
  const Meta& m = meta(t);
  if (!m.is_copied_view()) return;
  throw std::invalid_argument(fmt::format(
      "{}: would write {}, a copy that {} made because the viewed tensor had to be moved: the viewed tensor would not "
      "change. Clone the view to write the copy alone; or redistribute the viewed tensor first, so that the view needs "
      "no move",
      who, to_string(*m.spec), *m.copy.made_by));
}

void check_local(const at::Tensor& local, const Spec& spec, const char* who) {
  if (is_piece_of(local, spec)) return;
  const std::string text = fmt::format(
      "{}: internal error: the local tensor is {} [{}], but {} needs [{}] here; please report it with this text", who,
      c10::toString(local.scalar_type()), fmt::join(local.sizes(), ", "), to_string(spec),
      fmt::join(spec.local_sizes, ", "));
  spec.mesh.world().fail(who, text);
  throw std::runtime_error(text);
}

}  // namespace tessera::detail

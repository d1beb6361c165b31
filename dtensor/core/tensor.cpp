#include "tessera/dtensor/core/tensor.h"

#include <stdexcept>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/core/reused_memory.h"

namespace tessera::detail {

bool shares_memory(const at::Tensor& t) {
  const at::Tensor* memory = &t;
  if (is_dtensor(t)) {
    Meta& of = meta(t);
    if (c10::raw::intrusive_ptr::use_count(&of) > 1) return true;
    if (of.is_pending()) return false;
    memory = &of.local();
    if (memory->use_count() > 1) return true;
  }
  if (!memory->has_storage()) return false;
  const std::size_t others = memory->storage().use_count() - 1;
  return others > 1 || (others == 1 && !is_listed(memory->storage()));
}

void ViewCopy::set_current(uint32_t raised) const {
  source->writes = viewed.sum();
  source->operators = viewed.by_operators.current_version();
  source->raised = raised;
}

// Every operator that writes raises `by_operators`, so that none is taken for a raise of the version that is yet
// expected. An operator that changes a shape lowers it.
bool ViewCopy::is_current() const {
  const uint32_t since = viewed.sum() - source->writes;
  const auto by_operators = static_cast<int32_t>(viewed.by_operators.current_version() - source->operators);
  return since == 0 || (since <= source->raised && by_operators <= 0);
}

void expect_new_shape(const at::Tensor& t) {
  if (!raises_version(t)) return;
  const Meta& of = meta(t);
  c10::VariableVersion counter = of.is_copied_view() ? of.copy.viewed.by_operators : of.write_counters().by_operators;
  counter.set_version(static_cast<int64_t>(counter.current_version() - 1));  // modulo 2^32, as the sum
}

void check_current(const at::Tensor& t, const char* who) {
  const Meta& m = meta(t);
  const ViewCopy& copy = m.copy;
  if (!m.is_copied_view() || copy.is_current()) return;
  throw std::runtime_error(fmt::format(
      "{}: would read {}, a copy that {} made because the viewed tensor had to be moved; the viewed tensor, "
      "or the copy's piece, has been written since, so that they differ. Take the view again after the "
      "write, or clone it before",
      who, to_string(*m.spec), *copy.made_by));
}

void check_writable(const at::Tensor& t, const char* who) {
  const Meta& m = meta(t);
  if (!m.is_copied_view() || m.copy.source->viewed) return;
  throw std::invalid_argument(fmt::format(
      "{}: would write {}, a copy that {} made because the viewed tensor had to be moved: the viewed tensor would not "
      "change. Clone the view to write the copy alone; or redistribute the viewed tensor first, so that the view "
      "needs no move",
      who, to_string(*m.spec), *m.copy.made_by));
}

void check_local(const at::Tensor& local, const Spec& spec, const char* who) {
  if (is_piece_of(local, spec)) return;
  const bool is_own = std::string_view(who).starts_with("tessera::") || std::string_view(who).starts_with("aten::") ||
                      std::string_view(who).find("::") == std::string::npos;
  const std::string text = fmt::format(
      "{}: the local tensor is {} [{}], but {} needs [{}] here; {}", who, c10::toString(local.scalar_type()),
      fmt::join(local.sizes(), ", "), to_string(spec), fmt::join(spec.local_sizes, ", "),
      is_own ? "this is an internal error, unless a rule of your own decides for the operator; please report it with "
               "this text"
             : "the operator's rule, its local kernel or its Meta kernel says something else than what its kernel "
               "does; check_rule (tests/ops/rules/rule_checks.h) runs every strategy of a rule");
  spec.mesh.world().fail(who, text);
  throw std::runtime_error(text);
}

}  // namespace tessera::detail

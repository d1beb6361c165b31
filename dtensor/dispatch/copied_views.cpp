#include "tessera/dtensor/dispatch/copied_views.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/failing.h"

namespace tessera::dispatch {
namespace {

using detail::Meta;
using detail::ViewCopy;
using detail::ViewSource;

Meta& viewed_by(const ViewSource& source) { return static_cast<Meta&>(*source.viewed); }

// Calls visit(copy) for what `t` records and, where that is a copy of a copy, for what the other one records.
template <class Visit>
void each_copy(const at::Tensor& t, const Visit& visit) {
  for (const ViewCopy* copy = &detail::meta(t).copy; copy->source; copy = &viewed_by(*copy->source).copy) visit(*copy);
}

// Says whether two tensors, of which the first is a copy, lead to one tensor's memory, other than by one copy.
bool lead_to_one(const at::Tensor& copied, const at::Tensor& other) {
  const Meta& a = detail::meta(copied);
  const Meta& b = detail::meta(other);
  if (a.copy.source == b.copy.source) return false;
  return detail::share_counter(a.copy.viewed, b.is_copied_view() ? b.copy.viewed : b.write_counters());
}

void bring_back_piece(const ViewSource& source) {
  Meta& viewed = viewed_by(source);
  if (viewed.spec->mesh.is_member()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    viewed.local().copy_(redistribute_local(source.moved, *source.layout, viewed.spec->placements));
  }
  detail::note_write(viewed);
}

}  // namespace

void CopiedViewWrites::find(const Call& call) {
  name_ = &call.traits.name;
  for (const TensorArg& entry : call.tensors) {
    if (!detail::is_dtensor(*entry.tensor) || !call.writes(entry)) continue;
    if (!detail::meta(*entry.tensor).is_copied_view()) continue;
    detail::check_writable(*entry.tensor, name_->c_str());
    copies_.push_back(*entry.tensor);
  }
  if (copies_.empty()) return;
  raises_ = call.op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView);
  refuse_other_uses(call);
}

// A list operator may read a tensor after it has written another one; an operator that writes one tensor reads before.
void CopiedViewWrites::refuse_other_uses(const Call& call) const {
  const auto written = [&](const TensorArg& entry) { return call.writes(entry); };
  const bool writes_several = std::ranges::count_if(call.tensors, written) > 1;
  for (const TensorArg& entry : call.tensors) {
    if (!detail::is_dtensor(*entry.tensor) || (!call.writes(entry) && !writes_several)) continue;
    for (const at::Tensor& copy : copies_) {
      if (!lead_to_one(copy, *entry.tensor)) continue;
      throw std::invalid_argument(
          fmt::format("{}: would write {}, a copy that {} made because the viewed tensor had to be moved, and {} the "
                      "same tensor by another argument, {}; {}. Use them in two calls",
                      *name_, to_string(*detail::meta(copy).spec), *detail::meta(copy).copy.made_by,
                      call.writes(entry) ? "write" : "read", to_string(*detail::meta(*entry.tensor).spec),
                      call.writes(entry) ? "one of the writes would be lost" : "what it reads may be old"));
    }
  }
}

std::vector<std::string> CopiedViewWrites::ways_back() const {
  std::vector<std::string> out;
  for (const at::Tensor& t : copies_) {
    each_copy(t, [&](const ViewCopy& copy) {
      const Spec& to = *viewed_by(*copy.source).spec;
      const RoutePtr route = route_between(*copy.source->layout, to.placements);
      if (!route->communicates()) return;
      out.push_back(fmt::format("what is written to a view of {}, which {} took as {}, goes back by {}", to_string(to),
                                *copy.made_by, to_string(copy.source->layout->placements), route->plan().to_string()));
    });
  }
  return out;
}

void CopiedViewWrites::announce() const {
  if (copies_.empty()) return;
  const std::vector<std::string> ways = ways_back();
  if (!ways.empty()) detail::implicit_communication(*name_, [&] { return fmt::format("; {}", fmt::join(ways, "; ")); });
}

void CopiedViewWrites::bring_all_back(bool raised_later) const {
  World& world = detail::meta(copies_[0]).spec->mesh.world();
  try {
    const World::Scope scope(world, name_->c_str());
    for (const at::Tensor& t : copies_) {
      each_copy(t, [](const ViewCopy& copy) { bring_back_piece(*copy.source); });
    }
  } catch (...) {
    rethrow_failing_if_own(world, name_->c_str());
  }
  for (const at::Tensor& t : copies_) {
    each_copy(t, [&](const ViewCopy& copy) {
      const auto raises = [&](const at::Tensor& written) { return detail::raises_version(written, copy.viewed); };
      copy.set_current(raised_later ? static_cast<uint32_t>(std::ranges::count_if(copies_, raises)) : 0);
    });
  }
}

}  // namespace tessera::dispatch

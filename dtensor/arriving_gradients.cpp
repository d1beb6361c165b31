#include "tessera/dtensor/arriving_gradients.h"

#include <functional>
#include <iterator>
#include <numeric>

#include <ATen/Functions.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {

std::optional<std::string> pending_in(const Placements& placements, const DeviceMesh& mesh) {
  std::string pending;
  for (const Placement& each : placements) {
    if (!each.is_partial() || mesh.size(std::ssize(pending)) == 1) {
      pending += kNothingPending;
    } else if (each == Partial(ReduceOp::kSum)) {
      pending += kPendingSum;
    } else if (each == Partial(ReduceOp::kAvg)) {
      pending += kPendingAverage;
    } else {
      return std::nullopt;
    }
  }
  return pending;
}

Placements before_reduction(const Placements& layout, const std::string& pending) {
  Placements out = layout;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (pending[i] == kPendingSum) out[i] = Partial(ReduceOp::kSum);
    if (pending[i] == kPendingAverage) out[i] = Partial(ReduceOp::kAvg);
  }
  return out;
}

RoutePtr bucket_route(const Spec& from, const Placements& to, const CostModel& model) {
  CostModel by_bytes = model.links.empty() ? default_cost_model(from.mesh) : model;
  for (Link& link : by_bytes.links) link.microseconds = 0;
  return route_between(from, to, by_bytes);
}

std::vector<ArrivalOrder> orders_of_all(const DeviceMesh& mesh, const ArrivalOrder& mine) {
  if (mesh.world().is_fake()) return {mine};
  std::vector<int64_t> dims(static_cast<std::size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  const DeviceMesh all = mesh.merged(dims);
  const std::string text = to_string(mine);
  const auto size = static_cast<int64_t>(text.size());
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(text));
  const at::Tensor heads =
      values_on_host(all_gather(at::tensor({hash, size}, at::kLong).to(mesh.device()), all, 0), mesh.world());
  const auto* const head = heads.const_data_ptr<int64_t>();
  std::vector<int64_t> sizes;
  bool differ = false;
  for (int64_t i = 0; i < all.size(0); ++i) {
    differ |= head[2 * i] != hash || head[2 * i + 1] != size;
    sizes.push_back(head[2 * i + 1]);
  }
  if (!differ) return {mine};
  const at::Tensor own = at::from_blob(const_cast<char*>(text.data()), {size}, at::kByte).to(mesh.device());
  const at::Tensor texts = values_on_host(all_gather(own, sizes, all, 0), mesh.world());
  std::vector<ArrivalOrder> out;
  const char* at = static_cast<const char*>(texts.const_data_ptr());
  for (const int64_t each : sizes) {
    out.push_back(parse_arrivals({at, static_cast<std::size_t>(each)}));
    at += each;
  }
  return out;
}

}  // namespace tessera

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/dtensor/bucket_plan.h"
#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// These declarations connect the gradients of a bucket plan, which are values alone, with layouts, routes and ranks.
namespace tessera {

// These are the characters of ArrivingGradient::pending.
inline constexpr char kPendingSum = 's', kPendingAverage = 'a', kNothingPending = '-';

// Says what is pending in a gradient of these placements, or nullopt where that is a reduction that buckets do not
// have. Over one rank nothing is pending.
std::optional<std::string> pending_in(const Placements& placements, const DeviceMesh& mesh);

// Returns the placements in which `pending` reductions lead to `layout`.
Placements before_reduction(const Placements& layout, const std::string& pending);

// Returns the route of a gradient in a bucket, under `model` (without links: default_cost_model). The gradients of a
// bucket share the latencies of their collectives, so that latencies count as 0.
RoutePtr bucket_route(const Spec& from, const Placements& to, const CostModel& model);

// Returns the orders of all ranks of the mesh. Communication: one all_gather of 16 bytes per rank over all mesh
// dimensions, and one more of the texts where they differ; none in a fake world.
std::vector<ArrivalOrder> orders_of_all(const DeviceMesh& mesh, const ArrivalOrder& mine);

}  // namespace tessera

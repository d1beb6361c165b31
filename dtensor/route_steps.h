#pragma once

#include <memory>

#include "tessera/dtensor/route.h"
#include "tessera/placement/plan.h"

namespace tessera {

// The step made ready for this rank, a member of the mesh.
std::unique_ptr<const Route::Step> make_step(const PlanStep& step, const Plan& plan, const DeviceMesh& mesh);

}  // namespace tessera

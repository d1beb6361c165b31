#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/collectives/pending_collective.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// The frame in which every collective runs: one thread at a time is in one, in a world that is alive; it is recorded,
// compared under Checked, run below autograd, and its failure becomes the job's.

// Starts one. `bytes` are those that this rank puts in. What goes wrong in `begin` on one rank alone, such as memory,
// would leave the others waiting: it is failed().
PendingCollective start_call(const CollectiveCall& call, int64_t bytes, const Intent& intent,
                             c10::function_ref<BackendWork()> begin);

// What `start` starts, waited for; no other thread of this rank communicates meanwhile.
at::Tensor run_call(const DeviceMesh& mesh, int64_t mesh_dim, c10::function_ref<PendingCollective()> start);

}  // namespace tessera

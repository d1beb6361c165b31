#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/collectives/pending_collective.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Every collective runs in this frame. It lets one thread at a time communicate, checks that the world has not failed,
// records the collective, compares it under Checked, runs it below autograd, and makes its failure the job's.

// Starts a collective. `bytes` is the size of this rank's input. `begin` may fail on this rank alone, for example for
// lack of memory, and would leave the other ranks waiting: such an error fails the job.
PendingCollective start_call(const CollectiveCall& call, int64_t bytes, const Intent& intent,
                             c10::function_ref<BackendWork()> begin);

// Runs `start`, waits for the collective and returns its result. No other thread of this rank may communicate
// meanwhile.
at::Tensor run_call(const DeviceMesh& mesh, const MeshDim& mesh_dim, c10::function_ref<PendingCollective()> start);

}  // namespace tessera

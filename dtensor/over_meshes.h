#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Returns the elementwise maximum of `values` over all ranks of `meshes`, on the first mesh's device. Either every rank
// lists the same meshes, of which some may not contain it, or each lists the submeshes of one mesh that contain it:
// then the maximum is over all ranks of these submeshes and of those of other ranks that overlap them. A rank outside
// all meshes gets its own values back. NaN must be encoded: backends lose it in a maximum.
//
// Communication, counted under `op`, of the size of `values`: one all_reduce per mesh dimension of the mesh that
// contains the ranks of all others. If there is none, one per mesh dimension of every mesh that is not within another,
// as often as there are such meshes, so that a value reaches all ranks through ranks that meshes share. If meshes share
// no ranks, one over the ranks of all.
at::Tensor max_over_meshes(at::Tensor values, const std::vector<DeviceMesh>& meshes, const char* op);

}  // namespace tessera

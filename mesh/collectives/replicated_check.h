#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Under Checked, compares a plain tensor that counts as the same on every rank of the mesh, or of its dimensions
// `mesh_dims`: dtype, shape and a 64-bit hash of its values, by one all_gather of 16 bytes a dimension. Where it
// differs every rank throws MismatchError, which says `who` took it and what each rank holds. Does nothing in backward,
// where forward has looked before.
void check_replicated(const at::Tensor& plain, const DeviceMesh& mesh, const std::string& who);
void check_replicated(const at::Tensor& plain, const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims,
                      const std::string& who);

}  // namespace tessera

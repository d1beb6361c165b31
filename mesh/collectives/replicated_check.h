#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Under Checked, compares a plain tensor that should be equal on every rank of the mesh, or of its mesh dimensions
// `mesh_dims`: its dtype, its shape and a 64-bit hash of its values, by one all_gather per mesh dimension, which
// together bring 16 bytes from each rank to each. If they differ, every rank throws MismatchError, which names `who`
// took the tensor and lists each rank's dtype, shape and hash. Does nothing in backward, since forward has compared
// what backward uses; tensors that a hook makes there are not compared.
void check_replicated(const at::Tensor& plain, const DeviceMesh& mesh, const std::string& who);
void check_replicated(const at::Tensor& plain, const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims,
                      const std::string& who);

}  // namespace tessera

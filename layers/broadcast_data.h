#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Broadcasts the tensors of `data` named by `keys` from the first rank of the 1-D `mesh` to every rank of it. The
// `data` of other ranks is ignored and may be empty; all ranks give the same keys and datatype. The results are parts
// of one buffer on the mesh's device.
//
// Collectives: one all_reduce of 40 bytes, so that an error on the first rank is thrown on every rank; then broadcasts
// of 8 bytes per key, of 8 bytes per tensor dimension, and of all elements. A rank that cannot allocate the buffer
// fails the job.
// Throws std::invalid_argument on every rank when the first rank has no tensor for a key or one of another dtype, when
// ranks give different keys or datatypes, when a key is given twice, and on a mesh of several dimensions.
std::map<std::string, at::Tensor> broadcast_data(const std::vector<std::string>& keys,
                                                 const std::map<std::string, at::Tensor>& data, at::ScalarType datatype,
                                                 const DeviceMesh& mesh);

}  // namespace tessera

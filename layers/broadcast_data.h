#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// The tensors of `data` at the first rank of `mesh`, of one dimension, on every rank of it, by `keys`. Other ranks'
// `data` is not looked at and may be empty; keys and datatype are given alike by all. The results lie one behind the
// other in one buffer on the mesh's device.
//
// Collectives: one all_reduce of 40 bytes, by which an error on the first rank is thrown on every rank; a broadcast of
// 8 bytes a key, one of 8 bytes a dimension, and one of all elements. Another rank that has no memory for them fails
// the job. Throws std::invalid_argument on every rank alike when the first rank lacks a key or has one of another
// dtype, when ranks gave other keys or another datatype, when a key is given twice, and on a mesh of several
// dimensions.
std::map<std::string, at::Tensor> broadcast_data(const std::vector<std::string>& keys,
                                                 const std::map<std::string, at::Tensor>& data, at::ScalarType datatype,
                                                 const DeviceMesh& mesh);

}  // namespace tessera

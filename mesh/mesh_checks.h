#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

// What functions of each rank's plain tensors ask of the mesh and the tensors that they are given.
namespace tessera {

// Throws std::invalid_argument, "WHO: ...", unless `mesh` has one dimension and this rank is on it.
void check_one_dimension(const DeviceMesh& mesh, const char* who);

// Throws std::invalid_argument, "WHO: ...", where a defined `tensor`, called `what`, is not on the mesh's kind of
// device.
void check_device(const at::Tensor& tensor, const DeviceMesh& mesh, const char* who, const char* what);

// An error that this rank alone may see, such as a piece of another size than the one it has: fails the job with it, so
// that no rank waits for this one, and throws std::invalid_argument.
[[noreturn]] void refuse_alone(const DeviceMesh& mesh, const char* who, const std::string& why);

}  // namespace tessera

#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

// These functions check the arguments of functions that take plain tensors and a mesh.
namespace tessera {

// Throws std::invalid_argument, "WHO: ...", unless `mesh` is 1-D and contains this rank.
void check_one_dimension(const DeviceMesh& mesh, const char* who);

// Says whether `device` is this rank's device of the mesh. Any CPU device is the CPU, and one without an index, such as
// "cuda", is the current one.
bool is_own_device(c10::Device device, const DeviceMesh& mesh);
// Says the same of the tensor's device.
bool is_on_device(const at::Tensor& tensor, const DeviceMesh& mesh);

// Throws std::invalid_argument, "WHO: ...", if `tensor` is defined and not on the mesh's device. The text calls it
// `what`.
void check_device(const at::Tensor& tensor, const DeviceMesh& mesh, const char* who, const char* what);

// Reports an error that only this rank may see, such as a local tensor of a wrong size: fails the job with it, so that
// no rank waits for this one, and throws std::invalid_argument.
[[noreturn]] void refuse_alone(const DeviceMesh& mesh, const char* who, const std::string& why);

// Reports a wrong value, such as an index, that every rank of the mesh sees: throws std::invalid_argument. Where the
// world has more ranks, whose values may be right and which would wait for these, it fails the job first.
[[noreturn]] void refuse_value(const DeviceMesh& mesh, const char* who, const std::string& why);

}  // namespace tessera

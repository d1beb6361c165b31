#include "tessera/mesh/mesh_checks.h"

#include <stdexcept>

#include <fmt/format.h>

namespace tessera {

void check_one_dimension(const DeviceMesh& mesh, const char* who) {
  if (mesh.ndim() != 1) {
    throw std::invalid_argument(fmt::format(
        "{}: mesh {} has {} dimensions; give one of them, mesh[\"name\"], or several as one, mesh.merged({{0, 1}})",
        who, mesh.to_string(), mesh.ndim()));
  }
  if (mesh.is_member()) return;
  throw std::invalid_argument(
      fmt::format("{}: mesh {} does not have this rank; call it on the mesh's ranks alone", who, mesh.to_string()));
}

bool is_own_device(c10::Device device, const DeviceMesh& mesh) {
  return device.type() == mesh.device_type() && (device.is_cpu() || !device.has_index() || device == mesh.device());
}

bool is_on_device(const at::Tensor& tensor, const DeviceMesh& mesh) { return is_own_device(tensor.device(), mesh); }

void check_device(const at::Tensor& tensor, const DeviceMesh& mesh, const char* who, const char* what) {
  if (!tensor.defined() || is_on_device(tensor, mesh)) return;
  throw std::invalid_argument(fmt::format("{}: the {} is on {}, the mesh {} on {}; move the tensor first", who, what,
                                          tensor.device().str(), mesh.to_string(), mesh.device().str()));
}

void refuse_alone(const DeviceMesh& mesh, const char* who, const std::string& why) {
  mesh.world().fail(who, why);
  throw std::invalid_argument(fmt::format("{}: {}", who, why));
}

void refuse_value(const DeviceMesh& mesh, const char* who, const std::string& why) {
  if (mesh.size() < mesh.world().size()) refuse_alone(mesh, who, why);
  throw std::invalid_argument(fmt::format("{}: {}", who, why));
}

}  // namespace tessera

#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/group_options.h"
#include "tessera/mesh/replace_dims.h"

namespace tessera {
namespace {

std::vector<GroupOptions> options_of(const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims) {
  std::vector<GroupOptions> options;
  options.reserve(mesh_dims.size());
  for (const int64_t d : mesh_dims) options.push_back(mesh.group_options(d));
  return options;
}

std::vector<GroupOptions> options_of(const DeviceMesh& mesh) {
  std::vector<int64_t> all(static_cast<std::size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), 0);
  return options_of(mesh, all);
}

// Makes a DeviceMesh of `mesh` in the world of `from`; `options` has one entry per mesh dimension.
DeviceMesh make(const DeviceMesh& from, Mesh mesh, const std::vector<GroupOptions>& options) {
  MeshDimOptions by_name;
  for (std::size_t d = 0; d < options.size(); ++d) by_name[mesh.mesh_dim_name(static_cast<int64_t>(d))] = options[d];
  return DeviceMesh(from.world_ptr(), from.device_type(), std::move(mesh), by_name);
}

}  // namespace

DeviceMesh DeviceMesh::flatten(const MeshDims& mesh_dims, const std::string& name) const {
  Mesh flat = mesh().flatten(mesh_dims, name);
  const std::vector<int64_t> dims = mesh().normalize(mesh_dims);
  return make(*this, std::move(flat),
              replace_dims(options_of(*this), dims, {shared_group_options(options_of(*this, dims))}));
}

DeviceMesh DeviceMesh::unflatten(int64_t mesh_dim, const std::vector<int64_t>& sizes,
                                 const std::vector<std::string>& names) const {
  Mesh split = mesh().unflatten(mesh_dim, sizes, names);
  const int64_t d = mesh().normalize(mesh_dim);
  const std::vector<GroupOptions> parts(sizes.size(), group_options(d));
  return make(*this, std::move(split), replace_dims(options_of(*this), {d}, parts));
}

DeviceMesh DeviceMesh::unflatten(std::string_view name, const std::vector<int64_t>& sizes,
                                 const std::vector<std::string>& names) const {
  return unflatten(mesh().mesh_dim(name), sizes, names);
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& parts) const {
  std::vector<Mesh> meshes;
  std::vector<GroupOptions> options;
  for (const DeviceMesh& part : parts) {
    if (part.world_ptr() != world_ptr() || part.device_type() != device_type()) {
      throw std::invalid_argument(fmt::format(
          "concatenate: {} and {} are of two worlds or two device types; give slices of the mesh that it is called on",
          part.to_string(), to_string()));
    }
    meshes.push_back(part.mesh());
    for (const GroupOptions& option : options_of(part)) options.push_back(option);
  }
  return make(*this, mesh().concatenate(meshes), options);
}

}  // namespace tessera

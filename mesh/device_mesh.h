#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/mesh/group_options.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/world.h"

namespace tessera {

// How the groups of single mesh dimensions differ from others, by the mesh dimension's name, or its index as text in a
// mesh without names: {{"tp", {.timeout = std::chrono::seconds(30)}}}.
using MeshDimOptions = std::map<std::string, GroupOptions>;

// The handle a user holds: a Mesh in a World, with the device type whose tensors live on it. Cheap to copy; equal when
// the mesh, the world, the device type and the groups' options are. Groups are made at first use, not with the mesh.
class DeviceMesh {
 public:
  // Throws std::invalid_argument when a rank of `mesh` is outside the world, and on options of a mesh dimension that is
  // not there or that World::normalized refuses; std::runtime_error when `device_type` is CUDA and there is none. No
  // communication.
  DeviceMesh(std::shared_ptr<World> world, c10::DeviceType device_type, Mesh mesh, const MeshDimOptions& options = {});

  // The mesh whose groups a caller has made, one a mesh dimension of `mesh`; a c10d::ProcessGroup gives its own by
  // getBackend(device). From now on they are the groups of their ranks in this world, on every mesh; the caller does
  // not use them, or another group with them, while a collective runs. Other groups, such as those of merged mesh
  // dimensions, the world makes. `world` is the environment's when none is given. Called by every member of `mesh`. No
  // communication. Throws std::invalid_argument when this rank is outside `mesh`, and when a group's number of ranks,
  // this rank's place in it, or the global ranks that it tells are not those along its mesh dimension.
  static DeviceMesh from_group(const std::vector<c10::intrusive_ptr<c10d::Backend>>& groups, const std::string& device,
                               const Mesh& mesh, std::shared_ptr<World> world = nullptr);
  // The mesh of one dimension over one group. Its ranks are those that the group tells (global_ranks_in_group of its
  // options), or the world's when it is as large. Throws std::invalid_argument when neither says.
  static DeviceMesh from_group(const c10::intrusive_ptr<c10d::Backend>& group, const std::string& device,
                               const std::string& name = "", std::shared_ptr<World> world = nullptr);

  const Mesh& mesh() const;
  World& world() const;
  const std::shared_ptr<World>& world_ptr() const;
  c10::DeviceType device_type() const;
  // The device of this rank: the CPU, or the CUDA device of its local rank.
  c10::Device device() const;

  int64_t ndim() const { return mesh().ndim(); }
  int64_t size() const { return mesh().size(); }
  int64_t size(int64_t mesh_dim) const { return mesh().size(mesh_dim); }
  int64_t size(std::string_view name) const { return mesh().size(mesh().mesh_dim(name)); }
  std::string mesh_dim_name(int64_t mesh_dim) const;  // its name, or its index as text

  // This rank's coordinate, or nullopt outside the mesh: such a rank holds empty local tensors and skips communication.
  const std::optional<std::vector<int64_t>>& coordinate() const;
  bool is_member() const { return coordinate().has_value(); }
  // This rank's coordinate on one mesh dimension. Throws std::invalid_argument outside the mesh.
  int64_t local_rank(int64_t mesh_dim) const;
  int64_t local_rank(std::string_view name) const;

  // The mesh over the named dimensions, in that order, that this rank is in (a rank outside gets the one at coordinate
  // 0).
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  DeviceMesh operator[](std::initializer_list<std::string> names) const;  // mesh[{"tp", "dp"}]

  // As the same of Mesh. The groups of mesh dimensions that stay keep their options; merged mesh dimensions keep those
  // that all of them share; each part of a mesh dimension has that one's.
  DeviceMesh flatten(const MeshDims& mesh_dims, const std::string& name = "") const;
  DeviceMesh unflatten(int64_t mesh_dim, const std::vector<int64_t>& sizes,
                       const std::vector<std::string>& names = {}) const;
  DeviceMesh unflatten(std::string_view name, const std::vector<int64_t>& sizes,
                       const std::vector<std::string>& names) const;
  // mesh.concatenate({mesh["tp"], mesh["pp"]}). Throws std::invalid_argument, too, on parts of another world or device
  // type.
  DeviceMesh concatenate(const std::vector<DeviceMesh>& parts) const;

  // The mesh of one dimension over `mesh_dims` through this rank, for collectives over several mesh dimensions at once;
  // see Mesh::merged for the order of its ranks and its name ("dp+tp"). One mesh dimension gives that one's own mesh.
  // No communication: the group is made at first use. Kept with this mesh, so that asking again takes tens of
  // nanoseconds; safe from any thread.
  DeviceMesh merged(const std::vector<int64_t>& mesh_dims) const;

  // The process group along one mesh dimension through this rank, made at first use by its members. To use it, include
  // <torch/csrc/distributed/c10d/Backend.hpp>; what is done with it is neither counted nor guarded.
  c10::intrusive_ptr<c10d::Backend> group(int64_t mesh_dim) const;
  c10::intrusive_ptr<c10d::Backend> group(std::string_view name) const;
  // The ranks of that group in the order of their coordinate.
  const std::vector<int64_t>& group_ranks(int64_t mesh_dim) const;

  // Where that group differs from others of the world.
  const GroupOptions& group_options(int64_t mesh_dim) const;

  // "{dp: 2, tp: 2} on cpu"
  std::string to_string() const;
  // A number that equal meshes share and different ones do not, never reused in this process.
  uint64_t id() const;

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) { return a.impl_ == b.impl_ || a.id() == b.id(); }

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

// A mesh over all ranks of the world, row-major: init_device_mesh("cpu", {2, 2}, {"dp", "tp"}).
// `device` is "cpu" or "cuda"; `world` is the environment's when none is given; `options` as for DeviceMesh.
// Throws std::invalid_argument when the product of `shape` is not the world's size, naming both.
DeviceMesh init_device_mesh(const std::string& device, std::vector<int64_t> shape, std::vector<std::string> names = {},
                            std::shared_ptr<World> world = nullptr, const MeshDimOptions& options = {});

}  // namespace tessera

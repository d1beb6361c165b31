#pragma once

#include <concepts>
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

// Holds options for the process groups of single mesh dimensions. The key is the mesh dimension's name, or its index as
// text in a mesh without names: {{"tp", {.timeout = std::chrono::seconds(30)}}}.
using MeshDimOptions = std::map<std::string, GroupOptions>;

// Puts a Mesh in a World and says which type of device holds its tensors. Users hold this handle.
//
// Invariants:
//   - Two DeviceMeshes are equal when mesh, world, device type and group options are equal; equal ones share one
//     implementation, so copies and comparisons are cheap.
//   - A process group is made at its first use, not with the mesh.
class DeviceMesh {
 public:
  // Throws std::invalid_argument on a null world, on a device type other than the CPU, CUDA or the accelerator that has
  // registered itself, when a rank of `mesh` is outside the world, when `options` name a mesh dimension that `mesh`
  // does not have, and when World::normalized refuses them; std::runtime_error when `device_type` is CUDA and this rank
  // has no CUDA device, unless the world is fake. On CUDA makes device() the calling thread's current device, and lets
  // backward that this thread begins run on it. Does not communicate.
  DeviceMesh(std::shared_ptr<World> world, c10::DeviceType device_type, Mesh mesh, const MeshDimOptions& options = {});

  // Makes a mesh over process groups that the caller has made: `groups` has one per mesh dimension of `mesh`. From a
  // c10d::ProcessGroup take getBackend(device). From now on the world uses these groups for their ranks on every mesh;
  // the caller must not use them while a collective of Tessera runs. The world makes all other groups, such as those of
  // merged mesh dimensions. Without `world`, the environment's is used. Every member of `mesh` must call this. No
  // communication.
  // Throws where the constructor does, and std::invalid_argument when `groups` has not as many groups as `mesh` has
  // dimensions, on a null group, when this rank is outside `mesh`, and when a group's size, this rank's position in it,
  // or the global ranks in its options differ from those along its mesh dimension.
  static DeviceMesh from_group(const std::vector<c10::intrusive_ptr<c10d::Backend>>& groups, const std::string& device,
                               const Mesh& mesh, std::shared_ptr<World> world = nullptr);
  // Makes the 1-D mesh over one group. Its ranks are global_ranks_in_group of the group's options, or all ranks of the
  // world when the group is as large as the world. Throws std::invalid_argument when neither gives the ranks, and where
  // the function above does.
  static DeviceMesh from_group(const c10::intrusive_ptr<c10d::Backend>& group, const std::string& device,
                               const std::string& name = "", std::shared_ptr<World> world = nullptr);

  const Mesh& mesh() const;
  World& world() const;
  const std::shared_ptr<World>& world_ptr() const;
  c10::DeviceType device_type() const;
  // Returns this rank's device: the CPU, or World::device() of CUDA.
  c10::Device device() const;

  int64_t ndim() const { return mesh().ndim(); }
  int64_t size() const { return mesh().size(); }
  // These, and all functions below that take one mesh dimension, count a negative number from the end, and throw
  // std::invalid_argument on a number or name that the mesh does not have.
  int64_t size(int64_t mesh_dim) const { return mesh().size(mesh_dim); }
  int64_t size(std::string_view name) const { return mesh().size(mesh().mesh_dim(name)); }
  std::string mesh_dim_name(int64_t mesh_dim) const;  // its name, or its index as text

  // Returns this rank's coordinate, or nullopt for a rank outside the mesh, which holds empty local tensors and skips
  // communication.
  const std::optional<std::vector<int64_t>>& coordinate() const;
  bool is_member() const { return coordinate().has_value(); }
  // Returns this rank's coordinate on one mesh dimension. Throws std::invalid_argument on a rank outside the mesh.
  int64_t local_rank(int64_t mesh_dim) const;
  int64_t local_rank(std::string_view name) const;

  // Returns the submesh over the named dimensions, in that order, that contains this rank. A rank outside the mesh gets
  // the submesh at coordinate 0. Throws std::invalid_argument on an unknown name, on one given twice, and on none.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  DeviceMesh operator[](std::initializer_list<std::string> names) const;  // mesh[{"tp", "dp"}]
  // Two pairs of braces would make one string of two pointers. It is a template, so that {} is a list of names.
  template <typename = void>
  DeviceMesh operator[](std::initializer_list<std::initializer_list<const char*>> names) const = delete;

  // These do what Mesh::flatten and Mesh::unflatten do. Mesh dimensions that do not change keep their group options. A
  // flattened one keeps its parts' options where all of them are equal, else it has the world's. The parts of a split
  // one inherit its options.
  DeviceMesh flatten(const MeshDims& mesh_dims, const std::string& name = "") const;
  DeviceMesh unflatten(int64_t mesh_dim, const std::vector<int64_t>& sizes,
                       const std::vector<std::string>& names = {}) const;
  DeviceMesh unflatten(std::string_view name, const std::vector<int64_t>& sizes,
                       const std::vector<std::string>& names) const;
  // Does what Mesh::concatenate does: mesh.concatenate({mesh["tp"], mesh["pp"]}). Also throws std::invalid_argument
  // when the parts differ in world or device type.
  DeviceMesh concatenate(const std::vector<DeviceMesh>& parts) const;

  // Returns the 1-D mesh over `mesh_dims` that contains this rank, for collectives over several mesh dimensions at
  // once; see Mesh::merged for the order of its ranks and its name ("dp+tp"). One mesh dimension gives the submesh of
  // that dimension. It does not communicate, since the group is made at first use. The result is cached with this mesh,
  // so a second call takes tens of nanoseconds. Any thread may call it.
  DeviceMesh merged(const std::vector<int64_t>& mesh_dims) const;
  DeviceMesh merged(std::initializer_list<int64_t> mesh_dims) const;  // mesh.merged({0, 1})
  // The overloads of names are templates, so that {} and {0} are numbers.
  template <typename = void>
  DeviceMesh merged(std::initializer_list<std::string> names) const {  // mesh.merged({"dp", "tp"})
    return merged(mesh().normalize(MeshDims(names)));
  }
  template <std::same_as<std::vector<std::string>> Names>
  DeviceMesh merged(const Names& names) const {
    return merged(mesh().normalize(MeshDims(names)));
  }
  template <typename = void>
  DeviceMesh merged(std::initializer_list<std::initializer_list<const char*>> names) const = delete;

  // Returns the process group along one mesh dimension that contains this rank; its members make it together at first
  // use. To use it, include <torch/csrc/distributed/c10d/Backend.hpp>. Collectives called on it directly are neither
  // counted nor guarded by the world. Throws std::invalid_argument on a rank outside the mesh and on an unknown mesh
  // dimension; std::runtime_error when another thread of this rank communicates, when the world has failed, and when
  // the device or its backend is not available.
  c10::intrusive_ptr<c10d::Backend> group(int64_t mesh_dim) const;
  c10::intrusive_ptr<c10d::Backend> group(std::string_view name) const;
  // Returns the global ranks of that group, ordered by coordinate. A rank outside the mesh gets those of the
  // group at coordinate 0.
  const std::vector<int64_t>& group_ranks(int64_t mesh_dim) const;

  // Returns the options in which that group differs from the world's.
  const GroupOptions& group_options(int64_t mesh_dim) const;

  // Returns text such as "{dp: 2, tp: 2} on cpu".
  std::string to_string() const;
  // Returns a number that equal meshes share and different meshes do not. It is never reused in this process.
  uint64_t id() const;

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) { return a.impl_ == b.impl_ || a.id() == b.id(); }

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

// Makes a mesh over all ranks of the world, in row-major order: init_device_mesh("cpu", {2, 2}, {"dp", "tp"}).
// `device` is "cpu" or "cuda". Without `world`, the environment's is used. `options` are those of DeviceMesh.
// Throws std::invalid_argument, naming both, when the product of `shape` is not the world's size.
DeviceMesh init_device_mesh(const std::string& device, std::vector<int64_t> shape, std::vector<std::string> names = {},
                            std::shared_ptr<World> world = nullptr, const MeshDimOptions& options = {});

}  // namespace tessera

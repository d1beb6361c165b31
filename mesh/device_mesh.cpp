#include "tessera/mesh/device_mesh.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include <c10/core/AutogradState.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/device_type.h"
#include "tessera/mesh/group_options.h"

namespace tessera {

namespace {

// Caches the results of DeviceMesh::merged.
//
// Invariants:
//   - Entries are never removed or moved, and a new one is put at the front of the list, so find() needs no lock.
class MergedMeshes {
 public:
  const DeviceMesh* find(const std::vector<int64_t>& mesh_dims) const {
    for (const Entry* entry = newest_.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
      if (entry->mesh_dims == mesh_dims) return &entry->mesh;
    }
    return nullptr;
  }

  void add(const std::vector<int64_t>& mesh_dims, DeviceMesh mesh) {
    const std::lock_guard lock(mutex_);
    if (find(mesh_dims) != nullptr) return;  // another thread was first
    entries_.push_back({mesh_dims, std::move(mesh), newest_.load()});
    newest_.store(&entries_.back(), std::memory_order_release);
  }

 private:
  struct Entry {
    std::vector<int64_t> mesh_dims;
    DeviceMesh mesh;
    const Entry* next;
  };
  std::mutex mutex_;
  std::deque<Entry> entries_;  // a deque, since its entries do not move
  std::atomic<const Entry*> newest_{nullptr};
};

}  // namespace

struct DeviceMesh::Impl {
  Impl(std::shared_ptr<World> given_world, c10::DeviceType type, Mesh given_mesh,
       std::vector<GroupOptions> given_options);

  // Returns this rank's coordinate, or coordinate 0 on every mesh dimension for a rank outside the mesh.
  std::vector<int64_t> through() const { return coordinate.value_or(std::vector<int64_t>(mesh.shape().size(), 0)); }

  const std::shared_ptr<World> world;
  const c10::DeviceType device_type;
  const Mesh mesh;
  const std::vector<GroupOptions> options;  // one per mesh dimension
  const c10::Device device;
  const std::optional<std::vector<int64_t>> coordinate;
  // For each mesh dimension, `groups` holds the ranks along it that share through() on the other mesh dimensions.
  std::vector<std::vector<int64_t>> groups;
  std::vector<std::string> names;
  uint64_t id = 0;
  // `found` caches the process group of each mesh dimension from the first use on. World::Exclusive guards it.
  struct Found {
    c10::weak_intrusive_ptr<c10d::Backend> group;  // the world owns it, until World::adopt replaces it
    uint64_t adoptions = 0;                        // World::adoptions when it was found
  };
  mutable std::vector<Found> found;
  mutable MergedMeshes merged;  // holds 1-D meshes only, and only if this mesh has more: no mesh keeps itself alive
};

namespace {

uint64_t next_mesh_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void check_arguments(const std::shared_ptr<World>& world, c10::DeviceType device_type, const Mesh& mesh) {
  if (!world) throw std::invalid_argument("DeviceMesh: the world is null; pass World::from_environment()");
  for (const int64_t rank : mesh.ranks()) {
    if (rank < world->size()) continue;
    throw std::invalid_argument(fmt::format("DeviceMesh: mesh {} names rank {}, outside the world of {} ranks",
                                            mesh.to_string(), rank, world->size()));
  }
  if (!is_mesh_device(device_type)) {
    throw std::invalid_argument(fmt::format("DeviceMesh: device type '{}' is not supported; use cpu or cuda",
                                            c10::DeviceTypeName(device_type, /*lower_case=*/true)));
  }
}

// Makes the rank's GPU the calling thread's current device, for what the caller makes without naming one. Backward runs
// on this thread. LibTorch's thread for the GPU would not see Strict and the other modes; and since there is one for a
// GPU, a collective of a rank that is a thread would keep it, waiting for the other ranks.
void make_current(const World& world, c10::Device device) {
  if (device.is_cpu() || world.is_fake()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (guard.getDevice() != device) guard.setDevice(device);
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

// Returns the group options of each mesh dimension.
std::vector<GroupOptions> options_by_dim(const World& world, c10::DeviceType type, const Mesh& mesh,
                                         const MeshDimOptions& given) {
  std::vector<GroupOptions> options(mesh.shape().size());
  std::vector<std::string> names;
  for (int64_t d = 0; d < mesh.ndim(); ++d) names.push_back(mesh.mesh_dim_name(d));
  for (const auto& [name, option] : given) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      throw std::invalid_argument(
          fmt::format("DeviceMesh: options for mesh dimension '{}', which mesh {} does not have; "
                      "there are: {}",
                      name, mesh.to_string(), fmt::join(names, ", ")));
    }
    options[static_cast<std::size_t>(found - names.begin())] = world.normalized(option, type);
  }
  return options;
}

// Invariants:
//   - Equal meshes share one Impl while any of them lives, so comparing two of them compares pointers.
class InternTable {
 public:
  struct Key {
    uint64_t world;
    c10::DeviceType type;
    Mesh mesh;
    std::vector<GroupOptions> options;
    friend bool operator==(const Key&, const Key&) = default;
  };
  template <typename Impl, typename Make>
  std::shared_ptr<const Impl> get(const Key& key, const Make& make);

 private:
  struct Entry {
    Key key;
    std::weak_ptr<const void> held;
  };
  std::mutex mutex_;
  std::unordered_multimap<std::size_t, Entry> entries_;
  std::size_t next_sweep_ = 64;  // at this number of entries those of destroyed meshes are removed
};

template <typename Impl, typename Make>
std::shared_ptr<const Impl> InternTable::get(const Key& key, const Make& make) {
  const std::lock_guard lock(mutex_);
  const auto [first, last] = entries_.equal_range(key.mesh.hash());
  for (auto entry = first; entry != last;) {
    const std::shared_ptr<const void> held = entry->second.held.lock();
    if (!held) {
      entry = entries_.erase(entry);
      continue;
    }
    if (entry->second.key == key) return std::static_pointer_cast<const Impl>(held);
    ++entry;
  }
  if (entries_.size() >= next_sweep_) {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.held.expired(); });
    next_sweep_ = std::max<std::size_t>(64, 2 * entries_.size());
  }
  std::shared_ptr<const Impl> made = make();
  entries_.emplace(key.mesh.hash(), Entry{key, made});
  return made;
}

// The table is never destroyed, since a static object's destructor may make a DeviceMesh.
InternTable& intern_table() {
  static auto* const table = new InternTable;
  return *table;
}

}  // namespace

DeviceMesh::Impl::Impl(std::shared_ptr<World> given_world, c10::DeviceType type, Mesh given_mesh,
                       std::vector<GroupOptions> given_options)
    : world(std::move(given_world)),
      device_type(type),
      mesh(std::move(given_mesh)),
      options(std::move(given_options)),
      device(world->device(type)),
      coordinate(mesh.coordinate_of(world->rank())),
      id(next_mesh_id()) {
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    groups.push_back(mesh.ranks_along(d, through()));
    names.push_back(mesh.mesh_dim_name(d));
    found.push_back({c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>()), 0});
  }
}

DeviceMesh::DeviceMesh(std::shared_ptr<World> world, c10::DeviceType device_type, Mesh mesh,
                       const MeshDimOptions& options) {
  check_arguments(world, device_type, mesh);
  std::vector<GroupOptions> by_dim = options_by_dim(*world, device_type, mesh, options);
  const InternTable::Key key{world->id(), device_type, std::move(mesh), std::move(by_dim)};
  impl_ = intern_table().get<Impl>(
      key, [&] { return std::make_shared<const Impl>(std::move(world), device_type, key.mesh, key.options); });
  make_current(*impl_->world, impl_->device);
}

const Mesh& DeviceMesh::mesh() const { return impl_->mesh; }
World& DeviceMesh::world() const { return *impl_->world; }
const std::shared_ptr<World>& DeviceMesh::world_ptr() const { return impl_->world; }
c10::DeviceType DeviceMesh::device_type() const { return impl_->device_type; }
c10::Device DeviceMesh::device() const { return impl_->device; }
uint64_t DeviceMesh::id() const { return impl_->id; }
const std::optional<std::vector<int64_t>>& DeviceMesh::coordinate() const { return impl_->coordinate; }

std::string DeviceMesh::mesh_dim_name(int64_t mesh_dim) const {
  return impl_->names[static_cast<std::size_t>(mesh().normalize(mesh_dim))];
}

int64_t DeviceMesh::local_rank(int64_t mesh_dim) const {
  const int64_t d = mesh().normalize(mesh_dim);
  if (!is_member()) {
    throw std::invalid_argument(fmt::format("rank {} is outside mesh {} and has no coordinate; ask is_member() first",
                                            world().rank(), to_string()));
  }
  return (*coordinate())[static_cast<std::size_t>(d)];
}

int64_t DeviceMesh::local_rank(std::string_view name) const { return local_rank(mesh().mesh_dim(name)); }

DeviceMesh DeviceMesh::operator[](std::string_view name) const {
  return (*this)[std::vector<std::string>{std::string(name)}];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  MeshDimOptions options;
  for (const std::string& name : names) options[name] = group_options(mesh().mesh_dim(name));
  return DeviceMesh(world_ptr(), device_type(), mesh().slice(names, impl_->through()), options);
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string> names) const {
  return (*this)[std::vector<std::string>(names)];
}

DeviceMesh DeviceMesh::merged(const std::vector<int64_t>& mesh_dims) const {
  if (ndim() == 1 && mesh_dims.size() == 1 && mesh_dims[0] == 0) return *this;
  if (const DeviceMesh* const found = impl_->merged.find(mesh_dims)) return *found;
  Mesh merged = mesh().merged(mesh_dims, impl_->through());
  std::vector<GroupOptions> of_dims;
  of_dims.reserve(mesh_dims.size());
  for (const int64_t mesh_dim : mesh_dims) of_dims.push_back(group_options(mesh_dim));
  const MeshDimOptions options = {{merged.mesh_dim_name(0), shared_group_options(of_dims)}};
  DeviceMesh made(world_ptr(), device_type(), std::move(merged), options);
  if (ndim() > 1) impl_->merged.add(mesh_dims, made);
  return made;
}

DeviceMesh DeviceMesh::merged(std::initializer_list<int64_t> mesh_dims) const {
  return merged(std::vector<int64_t>(mesh_dims));
}

c10::intrusive_ptr<c10d::Backend> DeviceMesh::group(int64_t mesh_dim) const {
  const std::vector<int64_t>& ranks = group_ranks(mesh_dim);
  if (!is_member()) {
    throw std::invalid_argument(fmt::format(
        "rank {} is outside mesh {} and in none of its groups; ask is_member() first", world().rank(), to_string()));
  }
  const World::Exclusive exclusive(world());
  world().check_alive();
  Impl::Found& found = impl_->found[static_cast<std::size_t>(mesh().normalize(mesh_dim))];
  if (found.adoptions == world().adoptions()) {
    if (c10::intrusive_ptr<c10d::Backend> group = found.group.lock()) return group;
  }
  c10::intrusive_ptr<c10d::Backend> group = world().group(ranks, device_type(), group_options(mesh_dim));
  found = {c10::weak_intrusive_ptr<c10d::Backend>(group), world().adoptions()};
  return group;
}

c10::intrusive_ptr<c10d::Backend> DeviceMesh::group(std::string_view name) const {
  return group(mesh().mesh_dim(name));
}

const std::vector<int64_t>& DeviceMesh::group_ranks(int64_t mesh_dim) const {
  return impl_->groups[static_cast<std::size_t>(mesh().normalize(mesh_dim))];
}

const GroupOptions& DeviceMesh::group_options(int64_t mesh_dim) const {
  return impl_->options[static_cast<std::size_t>(mesh().normalize(mesh_dim))];
}

std::string DeviceMesh::to_string() const {
  return fmt::format("{} on {}", mesh().to_string(), c10::DeviceTypeName(device_type(), /*lower_case=*/true));
}

DeviceMesh init_device_mesh(const std::string& device, std::vector<int64_t> shape, std::vector<std::string> names,
                            std::shared_ptr<World> world, const MeshDimOptions& options) {
  const c10::DeviceType type = parse_device("init_device_mesh", device);
  Mesh mesh(std::move(shape), std::move(names));
  if (!world) world = World::from_environment();
  if (mesh.size() != world->size()) {
    throw std::invalid_argument(fmt::format(
        "init_device_mesh: shape ({}) needs {} ranks, the world has {}; start that many{}, or give DeviceMesh a "
        "Mesh over some",
        fmt::join(mesh.shape(), ", "), mesh.size(), world->size(),
        world->size() == 1 ? fmt::format(" (tools/launch -n {} PROGRAM)", mesh.size()) : ""));
  }
  return DeviceMesh(std::move(world), type, std::move(mesh), options);
}

}  // namespace tessera

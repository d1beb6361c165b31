#include "tessera/layers/parallelism.h"

#include <mutex>

#include <fmt/format.h>

namespace tessera {
namespace {

// Holds the mesh of the last init_parallelism().
struct Kept {
  std::mutex mutex;
  std::optional<DeviceMesh> mesh;
};

Kept& kept() {
  static auto* const instance = new Kept();  // never destroyed, since its World may end after other statics
  return *instance;
}

std::optional<DeviceMesh> current() {
  const std::lock_guard lock(kept().mutex);
  return kept().mesh;
}

void check(const ParallelismOptions& options, int64_t world_size) {
  if (options.model < 1 || options.pipeline < 1) {
    throw ParallelismError(fmt::format("init_parallelism: model {} and pipeline {}; both are at least 1", options.model,
                                       options.pipeline));
  }
  if (options.model > world_size || options.pipeline > world_size ||
      world_size % (options.model * options.pipeline) != 0) {
    throw ParallelismError(
        fmt::format("init_parallelism: model {} times pipeline {} does not divide the world of {} ranks; start another "
                    "number of ranks",
                    options.model, options.pipeline, world_size));
  }
}

GroupInfo info_of(const DeviceMesh& mesh) {
  return {.mesh = mesh, .global_ranks = mesh.group_ranks(0), .rank = mesh.local_rank(0), .world_size = mesh.size()};
}

}  // namespace

DeviceMesh init_parallelism(const ParallelismOptions& options) {
  const std::shared_ptr<World> world = options.world ? options.world : World::from_environment();
  check(options, world->size());
  const std::lock_guard lock(kept().mutex);
  if (kept().mesh) {
    throw ParallelismError(fmt::format(
        "init_parallelism: it was called before and made {}; call reset_parallelism first", kept().mesh->to_string()));
  }
  const int64_t data = world->size() / (options.model * options.pipeline);
  kept().mesh =
      init_device_mesh(options.device, {data, options.pipeline, options.model}, {"dp", "pp", "mp"}, world,
                       {{"dp", options.data_group}, {"pp", options.pipeline_group}, {"mp", options.model_group}});
  return *kept().mesh;
}

ParallelGroupInfo parallel_group_info() {
  const std::optional<DeviceMesh> mesh = current();
  if (!mesh) throw ParallelismError("parallel_group_info: there are no groups yet; call init_parallelism first");
  return {.mp = info_of((*mesh)["mp"]), .pp = info_of((*mesh)["pp"]), .dp = info_of((*mesh)["dp"])};
}

std::optional<GroupInfo> default_group_info() {
  const std::optional<DeviceMesh> mesh = current();
  return mesh ? std::make_optional(info_of(mesh->merged({0, 1, 2}))) : std::nullopt;
}

bool parallelism_is_initialized() { return current().has_value(); }

void reset_parallelism() {
  std::optional<DeviceMesh> gone;  // destroyed after the lock is released: it may be the last to hold its World
  const std::lock_guard lock(kept().mutex);
  gone.swap(kept().mesh);
}

}  // namespace tessera

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"

// The model, pipeline and data parallel groups of this process, for code that was written for such groups. Optional:
// everything else in the library takes a mesh, and nothing else reads what is kept here.
namespace tessera {

// Parallelism that was asked for wrongly, too early or twice.
class ParallelismError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ParallelismOptions {
  int64_t model = 1;     // ranks that share the work of each layer
  int64_t pipeline = 1;  // parts that the model is cut into lengthwise
  // How the groups of each kind differ from others of the world; see mesh/group_options.h. Data parallel groups have
  // what is left: size of the world / (model * pipeline) ranks.
  GroupOptions model_group = {};
  GroupOptions pipeline_group = {};
  GroupOptions data_group = {};
  std::string device = "cpu";              // or "cuda"
  std::shared_ptr<World> world = nullptr;  // default: the environment's
};

// Lays the ranks of the world out as {dp, pp, mp}, mp varying fastest, and keeps that for parallel_group_info(). Of 8
// ranks with model 2 and pipeline 2: mp [[0, 1], [2, 3], [4, 5], [6, 7]], pp [[0, 2], [1, 3], [4, 6], [5, 7]], dp [[0,
// 4], [1, 5], [2, 6], [3, 7]]. Returns that mesh. Without options.world it makes the environment's World, whose ranks
// meet in the store; otherwise no communication. Groups are made at first use.
// Throws ParallelismError, on every rank alike, when it was called before without reset_parallelism(), when a size is
// below 1, and when the world's size is not a multiple of model * pipeline. What is kept is the process's: ranks that
// are threads pass their meshes on instead.
DeviceMesh init_parallelism(const ParallelismOptions& options);

// The group of one kind that this rank is in.
struct GroupInfo {
  DeviceMesh mesh;                    // of one dimension, what region functions, layers and collectives take
  std::vector<int64_t> global_ranks;  // in the order of their places in the group
  int64_t rank = 0;                   // this rank's place in it
  int64_t world_size = 1;             // how many ranks it has
};
struct ParallelGroupInfo {
  GroupInfo mp;
  GroupInfo pp;
  GroupInfo dp;
};

// Throws ParallelismError before init_parallelism().
ParallelGroupInfo parallel_group_info();
// All ranks of the world; nullopt before init_parallelism().
std::optional<GroupInfo> default_group_info();

bool parallelism_is_initialized();
// Forgets the groups. Meshes and infos that were given out stay good. Without parallelism it does nothing.
void reset_parallelism();

}  // namespace tessera

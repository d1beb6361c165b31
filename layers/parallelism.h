#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"

// The model, pipeline and data parallel groups of this process, for code that was written for such groups. Their use is
// optional: everything else in the library takes a mesh, and nothing else reads what is kept here.
namespace tessera {

// Is thrown for a call of these functions with wrong sizes, too early or twice.
class ParallelismError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ParallelismOptions {
  int64_t model = 1;     // ranks that share the work of each layer
  int64_t pipeline = 1;  // stages that the layers of the model are split into
  // Options of the groups of each kind; see mesh/group_options.h. Data parallel groups have the remaining ranks: world
  // size / (model * pipeline).
  GroupOptions model_group = {};
  GroupOptions pipeline_group = {};
  GroupOptions data_group = {};
  std::string device = "cpu";              // or "cuda"
  std::shared_ptr<World> world = nullptr;  // default: the World of the environment
};

// Makes a mesh {dp, pp, mp} of the ranks of the world, mp varying fastest, keeps it for parallel_group_info() and
// returns it. Of 8 ranks with model 2 and pipeline 2:
//   mp [[0, 1], [2, 3], [4, 5], [6, 7]]
//   pp [[0, 2], [1, 3], [4, 6], [5, 7]]
//   dp [[0, 4], [1, 5], [2, 6], [3, 7]]
// Without options.world it makes the environment's World, whose ranks connect through the store; otherwise there is no
// communication. Process groups are made at their first use.
// Throws ParallelismError, on every rank, when it was called before without reset_parallelism(), when a size is below
// 1, and when the world's size is not a multiple of model * pipeline. The process keeps one such mesh: ranks that are
// threads of one process must pass their meshes instead.
DeviceMesh init_parallelism(const ParallelismOptions& options);

// The group of one kind that has this rank.
struct GroupInfo {
  DeviceMesh mesh;                    // 1-D; region functions, layers and collectives take it
  std::vector<int64_t> global_ranks;  // in the order of their ranks in the group
  int64_t rank = 0;                   // this rank's number in the group
  int64_t world_size = 1;             // the number of ranks in the group
};
struct ParallelGroupInfo {
  GroupInfo mp;
  GroupInfo pp;
  GroupInfo dp;
};

// Throws ParallelismError before init_parallelism().
ParallelGroupInfo parallel_group_info();
// Returns all ranks of the world; nullopt before init_parallelism().
std::optional<GroupInfo> default_group_info();

bool parallelism_is_initialized();
// Forgets the groups. Meshes and infos that were returned stay valid. It does nothing before init_parallelism().
void reset_parallelism();

}  // namespace tessera

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/dtensor/io/state_plan.h"
#include "tessera/dtensor/io/step_folders.h"
#include "tessera/mesh/world.h"

namespace tessera {

// Holds what this rank writes of one tensor. `bytes` are the values of its share, contiguous and in memory of the CPU;
// where it is undefined, they are taken from place.tensor, the plain values of the tile, when they are written.
struct ShareToWrite {
  TensorToWrite place;
  at::Tensor bytes;
};

// Returns the values of a share in the order of the tile: a view of place.tensor where that is contiguous.
at::Tensor packed(const TensorToWrite& place);

// Holds everything that one rank needs to write its part of a training state without communication. Several ranks write
// disjoint bytes of common files. Each then leaves the checksum shares of its bytes in a file of its own; the first
// rank joins them when all are there, writes state.json and gives the folder its name.
struct StateJob {
  int64_t rank = 0;
  std::vector<int64_t> ranks;  // all that write, the first of them first
  std::string path;            // the temporary folder, in which the files have their sizes
  std::vector<FilePlan> files;
  std::vector<ShareToWrite> shares;
  int64_t block_bytes = kUsualBlock;
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
  std::shared_ptr<World> world;  // its time limit, and its failure, end the wait for other ranks
  // The values come from a GPU: where its collectives were aborted, since the job has failed, they may be any.
  bool is_from_gpu = false;
  // The others are for the first rank alone.
  std::unique_ptr<NewStepFolder> new_folder;
  std::string folder;
  StateManifest manifest;
  int64_t keep = 0;
};

// Creates the files in `path` with their sizes. Throws std::runtime_error.
void create_files(const std::string& path, const std::vector<FilePlan>& files);

// Carries a job out. Throws std::runtime_error when the system refuses, when another rank's part is not there within
// the time limit, or the world has failed; and the world's failure where the folder has gone. If another rank fails,
// the first rank returns without having named the folder.
void write_state(StateJob& job);

// Tells the first rank that this one will not write its part, by a file; where that cannot be made, fails the job with
// the reason in `text`.
void give_up(const StateJob& job, const std::string& text);

}  // namespace tessera

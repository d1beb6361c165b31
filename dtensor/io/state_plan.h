#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/safetensors_header.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/layout.h"

namespace tessera {

// Describes one file of a training state. `head` is what it begins with, written by the mesh's first rank: the header
// of a safetensors file, or all of an index.
struct FilePlan {
  std::string name;
  std::string head;
  int64_t bytes = 0;

  friend bool operator==(const FilePlan&, const FilePlan&) = default;
};

// Describes what one rank writes of one tensor: elements [first, last) of the tile that it holds, in row-major order.
struct ShareOfTile {
  int64_t first = 0;
  int64_t last = 0;

  friend bool operator==(const ShareOfTile&, const ShareOfTile&) = default;
};

// Divides a tile of `elements` among `replicas` ranks that hold the same one, in shares of about 64 KiB or more, so
// that each element is in one share.
ShareOfTile share_of(int64_t elements, int64_t element_bytes, int64_t replicas, int64_t replica);

// Calls `run` for the contiguous runs, in elements of a row-major tensor of `shape`, that make up the share of a tile:
// in ascending order.
//   shape {4, 6}, tile {1-3, 2-5}, share [0, 5) -> runs of 3 at 8 and of 2 at 14
void for_each_run(const std::vector<int64_t>& shape, const Tile& tile, const ShareOfTile& share,
                  const std::function<void(int64_t begin, int64_t count)>& run);

// Says where a tensor is in the files, and which part of it this rank writes.
struct TensorToWrite {
  at::Tensor tensor;
  int64_t element_bytes = 0;
  std::size_t file = 0;    // index among the files
  int64_t data_begin = 0;  // the tensor's first byte in the file
  std::vector<int64_t> shape;
  // find_share sets these.
  Tile tile;
  ShareOfTile share;

  int64_t bytes() const { return (share.last - share.first) * element_bytes; }
};

// Holds the files of a training state and the tensors in them, both in the order of their data. It is the same on every
// rank until find_share is called.
struct StatePlan {
  std::vector<FilePlan> files;
  std::vector<TensorToWrite> tensors;
};

// Throws std::invalid_argument that begins with `op` unless `mesh`, whose ranks alone save and load a state, has all
// ranks of the tensors.
void check_meshes(const std::vector<SavedTensor>& tensors, const DeviceMesh& mesh, const char* op);

// Appends the files that `headers` describe (see plan_checkpoint): `name` alone, or parts and their index.
void append_files(StatePlan& plan, const std::string& name, const std::vector<SavedTensor>& tensors,
                  const std::vector<SafetensorsHeader>& headers);

// Sets which part this rank writes. The ranks that hold equal tiles of a DTensor divide them; a plain tensor is written
// by the mesh's first rank. The tensor must not be Partial.
void find_share(TensorToWrite& item, bool is_first_rank);

}  // namespace tessera

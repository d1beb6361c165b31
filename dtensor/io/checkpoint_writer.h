#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/safetensors_header.h"
#include "tessera/dtensor/io/save_lock.h"

namespace tessera {

// Plans the files of a checkpoint before any data is there. The plan depends only on the arguments, so every rank makes
// the same one. Tensors are put into files in the order of their names, until the next would make a file's data larger
// than max_shard_bytes (0: one file). Their data must be written file by file, in the order of the headers. Throws
// std::invalid_argument as lay_out_tensors does, and when max_shard_bytes is negative.
std::vector<SafetensorsHeader> plan_checkpoint(std::vector<TensorEntry> tensors, int64_t max_shard_bytes,
                                               const std::map<std::string, std::string>& metadata);

// Writes a checkpoint. If the process ends at any moment, the previous checkpoint still loads until the new one is
// complete (see save_weights in weights.h). A single file is written to `path`, or to `name` in it if it is a folder;
// several parts are written beside it, and their index to path + ".index.json". Parts take no name that an index in the
// folder gives to a file, their own last one included. An index that cannot be read may name any file in the folder:
// then the parts of the checkpoint that is replaced stay, with a warning.
//
//   CheckpointWriter writer(path, plan_checkpoint(...));
//   for (each header of the plan) for (each tensor in it) writer.append(tensor);
//   writer.publish();
//
// Without publish() it leaves nothing behind. Members throw std::runtime_error when the system refuses, and the
// constructor also while another writer of the same path lives, in any process of this host, unless each of the two
// writes a single file; they throw std::invalid_argument on a tensor that is not the next of the plan. The constructor
// throws std::invalid_argument, before it writes, where the index would be longer than `most_index_bytes`, and
// std::system_error where the process may not open as many files as there are parts.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::string& path, std::vector<SafetensorsHeader> plan,
                   int64_t most_index_bytes = kMaxIndexBytes, const char* name = kWeightsName);

  // Writes the values of the next tensor, on any device and of any strides.
  void append(const at::Tensor& tensor);
  void publish();

 private:
  std::string part_at(std::size_t i) const;
  std::string index_text() const;
  void open_file();
  void advance();
  void publish_parts();
  void remove_replaced();

  std::string path_;
  SaveLock lock_;
  std::vector<SafetensorsHeader> plan_;
  int64_t most_index_bytes_;
  WeightMap replaced_;  // of the sharded checkpoint that is replaced
  int64_t version_ = 1;
  std::vector<AtomicFile> files_;
  std::size_t next_tensor_ = 0;  // index in the header of files_.back()
};

}  // namespace tessera

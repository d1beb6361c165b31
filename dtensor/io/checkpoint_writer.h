#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/dtensor/io/safetensors_header.h"

namespace tessera {

// The files of a checkpoint to be, decided before any data is there: a pure function of the tensors, so that every rank
// makes the same one. Tensors go into files in the order of their names, until the next would make a file's data larger
// than max_shard_bytes (0: one file). Their data is written file by file, in the order of the headers. Throws
// std::invalid_argument as lay_out_tensors does, or when max_shard_bytes is negative.
std::vector<SafetensorsHeader> plan_checkpoint(std::vector<TensorEntry> tensors, int64_t max_shard_bytes,
                                               const std::map<std::string, std::string>& metadata);

// Writes a checkpoint so that, whenever the process ends, the one that was there before loads until the new one is
// whole (see save_weights in weights.h). One file is written to `path`; of several, the parts stand beside it and the
// index at path + ".index.json".
//
//   CheckpointWriter writer(path, plan_checkpoint(...));
//   for (each header of the plan) for (each tensor in it) writer.append(tensor);
//   writer.publish();
//
// Without publish() nothing is left behind. Members throw std::runtime_error when the system refuses,
// std::invalid_argument on a tensor that is not the next of the plan.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::string& path, std::vector<SafetensorsHeader> plan);

  // Writes the next tensor, on any device and of any strides, by its values.
  void append(const at::Tensor& tensor);
  void publish();

 private:
  void open_file();
  void advance();
  void publish_parts();
  void remove_replaced();

  std::string path_;
  std::vector<SafetensorsHeader> plan_;
  std::map<std::string, std::string> replaced_;  // the weight map of the sharded checkpoint that was there
  int64_t version_ = 1;
  std::vector<AtomicFile> files_;
  std::size_t next_tensor_ = 0;  // in the header of files_.back()
};

}  // namespace tessera

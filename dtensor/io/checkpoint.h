#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/safetensors_file.h"

namespace tessera {

// Ends the error of a collective load whose ranks have different fingerprints.
inline constexpr const char* kDifferentCheckpoints =
    "the ranks opened different checkpoints: their paths lead to different files, or a save replaced them meanwhile; "
    "pass a path that is the same checkpoint on every rank, and load again";

// Reads a checkpoint: one safetensors file, or several with their index. It can be moved, not copied.
class Checkpoint {
 public:
  // Opens `path`, which is as in load_weights: a file, an index (".index.json"), or a folder, where the first of
  // `names` counts that is there. Throws std::runtime_error when the system cannot open or read a file,
  // std::invalid_argument when there is no checkpoint, a file breaks the format, or the files and the index disagree.
  // With `checksums`, which must name every file that is opened, all reads are verified: see BlockReader. Of its blocks
  // those of one file are kept: they go when another one is read.
  explicit Checkpoint(const std::string& path, const FileChecksums* checksums = nullptr,
                      const std::vector<const char*>& names = {kWeightsName});

  // Returns every tensor by name.
  const std::map<std::string, const TensorEntry*, std::less<>>& tensors() const { return entries_; }
  // Returns nullptr when there is no tensor of that name.
  const TensorEntry* find(std::string_view name) const;
  // Returns the "__metadata__" of the first file.
  const std::map<std::string, std::string>& metadata() const { return files_.front().metadata(); }
  // Returns the file that holds the tensor, which must exist.
  const SafetensorsFile& file_of(std::string_view name) const;

  // Call these functions of SafetensorsFile on the file that holds the tensor.
  at::Tensor read_box(std::string_view name, const TensorBox& box, c10::Device device = at::kCPU) const;
  at::Tensor read_runs(std::string_view name, const ElementRuns& runs, c10::Device device = at::kCPU) const;
  int64_t bytes_read() const;
  // Returns where the tensor is, for reading in ascending order: the number of its file, and its first byte there.
  std::pair<std::size_t, int64_t> position_of(std::string_view name) const;
  // Returns what SafetensorsFile::fingerprint returns, of all files.
  std::string fingerprint() const;

 private:
  const SafetensorsFile& file_to_read(std::string_view name) const;
  void open_index(const std::string& path, const FileChecksums* checksums);

  std::vector<SafetensorsFile> files_;
  std::map<std::string, const TensorEntry*, std::less<>> entries_;
  std::map<std::string, std::size_t, std::less<>> file_index_;
  mutable std::size_t read_last_ = 0;  // index of the file that keeps blocks
};

}  // namespace tessera

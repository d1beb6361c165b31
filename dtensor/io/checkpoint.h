#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/safetensors_file.h"

namespace tessera {

// A checkpoint open for reading: one safetensors file, or several with their index. Move-only.
class Checkpoint {
 public:
  // `path` is as in load_weights: a file, an index (".index.json"), or a folder.
  // Throws std::runtime_error when the system cannot open or read a file, std::invalid_argument when there is no
  // checkpoint, a file breaks the format, or the files and the index disagree.
  explicit Checkpoint(const std::string& path);

  // Every tensor by name.
  const std::map<std::string, const TensorEntry*, std::less<>>& tensors() const { return entries_; }
  // nullptr when there is none of that name.
  const TensorEntry* find(std::string_view name) const;
  // "__metadata__" of the first file.
  const std::map<std::string, std::string>& metadata() const { return files_.front().metadata(); }
  // The file that holds the tensor. It must be there.
  const SafetensorsFile& file_of(std::string_view name) const;

  // SafetensorsFile::read_box of the file that holds the tensor.
  at::Tensor read_box(std::string_view name, const TensorBox& box) const;
  int64_t bytes_read() const;

 private:
  void open_index(const std::string& path);

  std::vector<SafetensorsFile> files_;
  std::map<std::string, const TensorEntry*, std::less<>> entries_;
  std::map<std::string, std::size_t, std::less<>> file_index_;
};

}  // namespace tessera

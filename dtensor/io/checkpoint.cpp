#include "tessera/dtensor/io/checkpoint.h"

#include <filesystem>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/file_descriptor.h"
#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// Returns the file to open for the user's path. A single file is preferred to an index: both exist when a save was
// interrupted, and then either one is complete.
std::string resolve(const std::string& path, const std::vector<const char*>& names) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  std::vector<std::string> files;
  for (const char* name : names) files.push_back(is_folder ? (fs::path(path) / name).string() : path);
  for (const std::string& file : files) {
    if (exists(file)) return file;
    if (exists(index_path(file))) return index_path(file);
  }
  if (!is_folder) return path;  // opening it gives the system's own error
  throw std::invalid_argument(fmt::format("the folder '{}' holds neither {} nor {}; pass the path of the file", path,
                                          names.front(), index_path(names.front())));
}

std::optional<BlockChecksums> checksums_of(const std::string& path, const FileChecksums* checksums) {
  if (checksums == nullptr) return std::nullopt;
  const auto found = checksums->find(fs::path(path).filename().string());
  if (found == checksums->end()) throw std::invalid_argument(fmt::format("'{}' is not among the saved files", path));
  return found->second;
}

// Opens one of the files that an index names. All of them stay open.
SafetensorsFile open_part(const std::string& path, const FileChecksums* checksums, const WeightMap& weights) {
  try {
    return SafetensorsFile(path, checksums_of(path, checksums));
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::too_many_files_open) throw;
    std::set<std::string_view> files;
    for (const auto& [tensor, file] : weights) files.insert(file);
    throw_too_many_open(path, files.size());
  }
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path, const FileChecksums* checksums, const std::vector<const char*>& names) {
  const std::string file = resolve(path, names);
  if (file.ends_with(index_path(""))) {
    open_index(file, checksums);
  } else {
    files_.emplace_back(file, checksums_of(file, checksums));
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    for (const TensorEntry& entry : files_[i].tensors()) {
      entries_.emplace(entry.name, &entry);
      file_index_.emplace(entry.name, i);
    }
  }
}

void Checkpoint::open_index(const std::string& path, const FileChecksums* checksums) {
  const WeightMap weights = read_checkpoint_index(path, checksums_of(path, checksums));
  if (weights.empty()) throw std::invalid_argument(fmt::format("'{}': index: it names no tensor", path));
  std::map<std::string, std::size_t> opened;
  for (const auto& [tensor, file] : weights) {
    if (opened.emplace(file, files_.size()).second)
      files_.push_back(open_part((fs::path(folder_of(path)) / file).string(), checksums, weights));
    const SafetensorsFile& holder = files_[opened.at(file)];
    if (holder.find(tensor) != nullptr) continue;
    throw std::invalid_argument(
        fmt::format("'{}': index: tensor {} is not in '{}'; the files are of different checkpoints", path,
                    in_quotes(tensor), holder.path()));
  }
  for (const auto& [name, i] : opened) {
    for (const TensorEntry& entry : files_[i].tensors()) {
      const auto mapped = weights.find(entry.name);
      if (mapped != weights.end() && mapped->second == name) continue;
      throw std::invalid_argument(
          fmt::format("'{}': index: '{}' holds tensor {}, which the index {}; the files are of "
                      "different checkpoints",
                      path, files_[i].path(), in_quotes(entry.name),
                      mapped == weights.end() ? "does not list" : "says is in " + in_quotes(mapped->second)));
    }
  }
}

const TensorEntry* Checkpoint::find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : found->second;
}

const SafetensorsFile& Checkpoint::file_of(std::string_view name) const {
  return files_[file_index_.find(name)->second];
}

const SafetensorsFile& Checkpoint::file_to_read(std::string_view name) const {
  const std::size_t index = file_index_.find(name)->second;
  if (index != read_last_) files_[read_last_].drop_kept();
  read_last_ = index;
  return files_[index];
}

at::Tensor Checkpoint::read_box(std::string_view name, const TensorBox& box, c10::Device device) const {
  return file_to_read(name).read_box(*find(name), box, device);
}

at::Tensor Checkpoint::read_runs(std::string_view name, const ElementRuns& runs, c10::Device device) const {
  return file_to_read(name).read_runs(*find(name), runs, device);
}

std::pair<std::size_t, int64_t> Checkpoint::position_of(std::string_view name) const {
  return {file_index_.find(name)->second, find(name)->begin};
}

std::string Checkpoint::fingerprint() const {
  std::string all;
  for (const SafetensorsFile& file : files_) all += file.fingerprint();
  return all;
}

int64_t Checkpoint::bytes_read() const {
  int64_t bytes = 0;
  for (const SafetensorsFile& file : files_) bytes += file.bytes_read();
  return bytes;
}

}  // namespace tessera

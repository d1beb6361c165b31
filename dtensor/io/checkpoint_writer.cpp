#include "tessera/dtensor/io/checkpoint_writer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/io/strict_json.h"
#include "tessera/dtensor/io/two_buffers.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/core/logger.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string find_target(const std::string& path, const char* name) {
  if (path.empty())
    throw std::invalid_argument("saving to '': the path is empty; name a file, or a folder that is there");
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return (fs::path(path) / name).string();
  if (path.ends_with(index_path(""))) {
    throw std::invalid_argument(
        fmt::format("saving to '{}': pass the name without '.index.json'; an index is written beside "
                    "it when there are several files",
                    path));
  }
  if (!fs::is_directory(folder_of(path), ignored)) {
    throw std::invalid_argument(
        fmt::format("saving to '{}': there is no folder '{}'; make it first", path, folder_of(path)));
  }
  return path;
}

// Returns the file to write. It and its index must be regular files if they exist, since publishing one removes the
// other.
std::string resolve_target(const std::string& path, const char* name) {
  std::string target = find_target(path, name);
  check_replaceable(target);
  check_replaceable(index_path(target));
  return target;
}

std::string name_of(const std::string& path) { return fs::path(path).filename().string(); }

// Returns the parts of a sharded checkpoint at `path`; empty when there is none. Throws std::runtime_error when the
// system cannot read its index (too many open files): then its parts must stay.
WeightMap existing_parts(const std::string& path) {
  std::error_code ignored;
  if (!fs::exists(index_path(path), ignored)) return {};
  try {
    return read_checkpoint_index(index_path(path));
  } catch (const std::invalid_argument&) {
    return {};  // no reader accepts it, so there is nothing to protect
  }
}

std::set<std::string> file_names(const WeightMap& weights) {
  std::set<std::string> names;
  for (const auto& [tensor, file] : weights) names.insert(file);
  return names;
}

// Holds the names that other checkpoints in a folder give to files in their indexes. An index that cannot be read may
// name any file that is there; `unread` says why one cannot.
struct OthersNames {
  std::set<std::string> taken;
  std::string unread;  // "": all can be read
};

OthersNames names_of_others(const std::string& path) {
  const std::string own_index = name_of(index_path(path));
  OthersNames names;
  std::set<std::string> present;
  std::error_code error;
  const fs::directory_iterator items(folder_of(path), error);
  if (error) throw std::system_error(error, fmt::format("cannot list '{}'", folder_of(path)));
  for (const auto& item : items) {
    const std::string name = item.path().filename().string();
    present.insert(name);
    if (!name.ends_with(index_path("")) || name == own_index) continue;
    try {
      names.taken.merge(file_names(read_checkpoint_index(item.path().string())));
    } catch (const std::exception& refused) {
      names.unread = refused.what();
    }
  }
  if (!names.unread.empty()) names.taken.merge(present);
  return names;
}

// Throws where the process may not open that many files more: all parts stay open until they are published.
void check_can_be_open(const std::string& path, std::size_t files) {
  rlimit limit{};
  std::error_code ignored;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const fs::directory_iterator open("/proc/self/fd", ignored), none;
  if (files + static_cast<std::size_t>(std::distance(open, none)) >= limit.rlim_cur) throw_too_many_open(path, files);
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw_errno("remove", path);
}

}  // namespace

std::vector<SafetensorsHeader> plan_checkpoint(std::vector<TensorEntry> tensors, int64_t max_shard_bytes,
                                               const std::map<std::string, std::string>& metadata) {
  if (max_shard_bytes < 0) {
    throw std::invalid_argument(
        fmt::format("max_shard_bytes is {}; pass a number of bytes, or 0 for one file", max_shard_bytes));
  }
  // Lays out all tensors once, which checks that names are different across files too.
  tensors = lay_out_tensors(std::move(tensors));
  std::ranges::sort(tensors, {}, &TensorEntry::name);
  std::vector<SafetensorsHeader> plan = {{.metadata = metadata, .tensors = {}}};
  int64_t bytes = 0;
  for (TensorEntry& entry : tensors) {
    if (max_shard_bytes > 0 && bytes > 0 && bytes + entry.nbytes() > max_shard_bytes) {
      plan.push_back({.metadata = metadata, .tensors = {}});
      bytes = 0;
    }
    bytes += entry.nbytes();
    plan.back().tensors.push_back(std::move(entry));
  }
  for (SafetensorsHeader& file : plan) file.tensors = lay_out_tensors(std::move(file.tensors));
  return plan;
}

CheckpointWriter::CheckpointWriter(const std::string& path, std::vector<SafetensorsHeader> plan,
                                   int64_t most_index_bytes, const char* name)
    : path_(resolve_target(path, name)),
      lock_(path_, plan.size() > 1),
      plan_(std::move(plan)),
      most_index_bytes_(most_index_bytes),
      replaced_(existing_parts(path_)) {
  check_can_be_open(path_, plan_.size());
  if (plan_.size() > 1) {
    // A part that no index names was left by a save that was cut off.
    std::set<std::string> taken = names_of_others(path_).taken;
    taken.merge(file_names(replaced_));
    version_ = free_version(name_of(path_), static_cast<int64_t>(plan_.size()), taken);
    index_text();  // throws where readers would refuse the index
  }
  open_file();
}

std::string CheckpointWriter::part_at(std::size_t i) const {
  return part_name(name_of(path_), static_cast<int64_t>(i), static_cast<int64_t>(plan_.size()), version_);
}

std::string CheckpointWriter::index_text() const {
  WeightMap weights;
  int64_t total = 0;
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    const std::string part = part_at(i);
    for (const TensorEntry& entry : plan_[i].tensors) weights.emplace(entry.name, part);
    total += plan_[i].data_bytes();
  }
  return serialize_checkpoint_index(weights, total, most_index_bytes_);
}

void CheckpointWriter::open_file() {
  const std::size_t i = files_.size();
  files_.emplace_back(plan_.size() == 1 ? path_ : (fs::path(folder_of(path_)) / part_at(i)).string());
  const std::string header = serialize_safetensors_header(plan_[i]);
  files_.back().write(header.data(), static_cast<int64_t>(header.size()));
  next_tensor_ = 0;
}

// Opens the next tensor's file when this one is complete.
void CheckpointWriter::advance() {
  if (next_tensor_ < plan_[files_.size() - 1].tensors.size()) return;
  files_.back().sync();
  if (files_.size() < plan_.size()) open_file();
}

void CheckpointWriter::append(const at::Tensor& tensor) {
  const std::vector<TensorEntry>& entries = plan_[files_.size() - 1].tensors;
  if (next_tensor_ == entries.size()) throw std::invalid_argument("saving: append() after the last tensor of the plan");
  const TensorEntry& entry = entries[next_tensor_];
  if (tensor.scalar_type() != entry.dtype || tensor.sizes() != at::IntArrayRef(entry.shape)) {
    throw std::invalid_argument(fmt::format("saving tensor {}: planned as {} of shape [{}], given {} of shape [{}]",
                                            in_quotes(entry.name), c10::toString(entry.dtype),
                                            fmt::join(entry.shape, ", "), c10::toString(tensor.scalar_type()),
                                            fmt::join(tensor.sizes(), ", ")));
  }
  const at::Tensor given = in_memory(tensor.detach());
  if (given.is_cpu() || !given.is_contiguous()) {
    const at::Tensor data = given.cpu().contiguous();  // in the host's memory, so that the GPU holds no copy
    files_.back().write(data.const_data_ptr(), entry.nbytes());
  } else {
    write_from_device(given, [&](const char* from, int64_t, int64_t count) { files_.back().write(from, count); });
  }
  ++next_tensor_;
  advance();
}

void CheckpointWriter::publish() {
  const bool complete = files_.size() == plan_.size() && next_tensor_ == plan_.back().tensors.size();
  if (!complete) throw std::invalid_argument(fmt::format("saving to '{}': publish() before the last tensor", path_));
  if (plan_.size() == 1) {
    if (plan_.front().tensors.empty()) files_.front().sync();
    files_.front().publish();
    sync_folder(folder_of(path_));
  } else {
    publish_parts();
  }
  remove_replaced();
  lock_.release();
}

void CheckpointWriter::publish_parts() {
  AtomicFile index(index_path(path_));
  const std::string text = index_text();
  index.write(text.data(), static_cast<int64_t>(text.size()));
  index.sync();
  // Another checkpoint may have been saved meanwhile. Two that are published within the same moment do not see this.
  const std::set<std::string> taken = names_of_others(path_).taken;
  for (const AtomicFile& file : files_) {
    if (!taken.contains(name_of(file.path()))) continue;
    throw std::runtime_error(
        fmt::format("saving to '{}': another checkpoint in the folder has taken the name {} meanwhile; save again",
                    path_, in_quotes(name_of(file.path()))));
  }
  for (AtomicFile& file : files_) file.publish();
  // The parts' names must be on disk before the index that points to them.
  sync_folder(folder_of(path_));
  index.publish();
  sync_folder(folder_of(path_));
}

// Removes the old checkpoint after the new one is in place, and first the file that readers would open.
void CheckpointWriter::remove_replaced() {
  if (plan_.size() == 1) {
    remove_file(index_path(path_));
  } else {
    remove_file(path_);
  }
  sync_folder(folder_of(path_));
  if (replaced_.empty()) return;
  auto [kept, unread] = names_of_others(path_);
  if (!unread.empty()) {
    logger().warn(
        "saving to '{}': the files of the checkpoint that was there stay, since an index in the folder that cannot be "
        "read may name them; mend or remove it: {}",
        path_, unread);
  }
  for (const AtomicFile& file : files_) kept.insert(name_of(file.path()));
  for (const std::string& name : file_names(replaced_)) {
    if (!kept.contains(name) && is_part_name(name_of(path_), name)) {
      remove_file((fs::path(folder_of(path_)) / name).string());
    }
  }
}

}  // namespace tessera

#include "tessera/dtensor/io/step_folders.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/mesh/core/same_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kTemporary = ".tmp-";

std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [read_to, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  const bool is_step = error == std::errc() && step >= 0 && read_to == end && name == step_folder_name(step);
  return is_step ? std::optional(step) : std::nullopt;
}

bool is_temporary(const std::string& name) {
  return name.starts_with("." + std::string(kPrefix)) && name.find(kTemporary) != std::string::npos;
}

std::string temporary_path(const std::string& folder, const std::string& name) {
  std::random_device device;
  return fmt::format("{}/.{}{}{:08x}{:08x}", folder, name, kTemporary, device(), device());
}

FileDescriptor open_folder(const std::string& path) {
  return FileDescriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// Removes temporary folders that nobody has locked: their processes ended before they could.
void remove_abandoned(const std::string& folder) {
  std::error_code ignored;
  for (const auto& item : fs::directory_iterator(folder, ignored)) {
    if (!is_temporary(item.path().filename().string())) continue;
    const FileDescriptor there = open_folder(item.path().string());
    if (there.is_open() && ::flock(there.get(), LOCK_EX | LOCK_NB) == 0) fs::remove_all(item.path(), ignored);
  }
}

// Is how often a new name is tried, since a file system may fail to look at any.
constexpr int kMostTries = 100;

// Creates and locks a folder of a new name. Before it is locked, another job may take it for abandoned and remove it;
// then another one is made.
FileDescriptor create_locked(const std::string& folder, const std::string& name, std::string& path) {
  for (int tries = 0; tries < kMostTries; ++tries) {
    path = temporary_path(folder, name);
    if (::mkdir(path.c_str(), 0777) != 0) throw_errno("make a folder to save into", path);
    FileDescriptor there = open_folder(path);
    if (!there.is_open() && errno != ENOENT) throw_errno("open the folder", path);
    if (!there.is_open()) continue;
    // Another job that has the lock is about to remove the folder. Every other failure is harmless: there are file
    // systems without locks.
    const bool is_theirs = ::flock(there.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!is_theirs && names_file(path, there.get())) return there;
  }
  throw_errno("lock the folder", path);
}

// Says whether what was asked for is not there, which is no trouble of this process.
bool is_absent(const std::error_code& error) {
  return error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
}

// Removes an old state, unless another job has removed or replaced it meanwhile. Warns where it cannot be removed: the
// new one is saved in any case.
void remove_step(const std::string& folder, const std::string& path) {
  const std::string removed = temporary_path(folder, fs::path(path).filename().string());
  std::error_code error;
  if (std::rename(path.c_str(), removed.c_str()) == 0) {
    fs::remove_all(removed, error);
  } else if (errno != ENOENT) {
    error = std::error_code(errno, std::generic_category());
  }
  if (!error) return;
  spdlog::warn("the old training state '{}' cannot be removed: {}; the next save tries again", path, error.message());
}

// Gives the folder `path` the name `target`. Returns whether a folder that had this name is called `path` now.
bool rename_or_exchange(const std::string& path, const std::string& target) {
  while (true) {
    if (std::rename(path.c_str(), target.c_str()) == 0) return false;
    if (errno != EEXIST && errno != ENOTEMPTY) throw_errno("name the folder", target);
    if (::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) return true;
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) {
      throw std::invalid_argument(fmt::format(
          "'{}' is there, and its file system cannot exchange it for a new one: remove it, or save to another folder",
          target));
    }
    // Another job may have removed the other folder meanwhile; then the name is free.
    if (errno != ENOENT) throw_errno("exchange for a new folder", target);
  }
}

}  // namespace

std::string step_folder_name(int64_t step) { return fmt::format("{}{:08}", kPrefix, step); }

std::map<int64_t, std::string> step_folders(const std::string& folder) {
  std::map<int64_t, std::string> found;
  std::error_code error;
  const fs::directory_iterator items(folder, error);
  if (error && !is_absent(error)) throw std::system_error(error, fmt::format("cannot list '{}'", folder));
  for (const auto& item : items) {
    const std::optional<int64_t> step = step_of(item.path().filename().string());
    if (step && item.is_directory(error)) found.emplace(*step, item.path().string());
  }
  return found;
}

bool is_whole_state(const std::string& step_folder) {
  try {
    const StateManifest manifest = parse_state_manifest(read_state_manifest(step_folder), step_folder);
    return std::ranges::all_of(manifest.files, [&](const auto& file) {
      return static_cast<int64_t>(fs::file_size(fs::path(step_folder) / file.first)) == file.second.file_bytes;
    });
  } catch (const std::system_error& error) {
    if (is_absent(error.code())) return false;
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception&) {
    return false;  // its text is torn or damaged
  }
}

NewStepFolder::NewStepFolder(const std::string& folder, int64_t step)
    : folder_(folder), target_(folder + "/" + step_folder_name(step)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (!fs::is_directory(folder_))
    throw std::runtime_error(fmt::format("cannot make the folder '{}': {}", folder_, error.message()));
  remove_abandoned(folder_);
  lock_ = create_locked(folder_, step_folder_name(step), path_);
}

NewStepFolder::~NewStepFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

void NewStepFolder::publish() {
  sync_folder(path_);
  // An older folder that holds files gets the temporary name, under which the destructor removes it.
  if (!rename_or_exchange(path_, target_)) path_.clear();
  sync_folder(folder_);
}

void keep_newest_steps(const std::string& folder, int64_t keep, int64_t saved) {
  if (keep <= 0) return;
  try {
    std::vector<std::string> superfluous;
    const std::map<int64_t, std::string> found = step_folders(folder);
    int64_t whole = 0;
    for (auto step = found.rbegin(); step != found.rend(); ++step) {
      if (whole < keep) {
        whole += is_whole_state(step->second) ? 1 : 0;
      } else if (step->first != saved) {
        superfluous.push_back(step->second);
      }
    }
    for (const std::string& path : superfluous) remove_step(folder, path);
  } catch (const std::exception&) {
    return;  // the state is saved; the next save removes more
  }
}

}  // namespace tessera

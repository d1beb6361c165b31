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

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/dtensor/io/state_manifest.h"

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

// Creates and locks a folder of a new name. Before it is locked, another job may take it for abandoned and remove it;
// then another one is made.
FileDescriptor create_locked(const std::string& folder, const std::string& name, std::string& path) {
  while (true) {
    path = temporary_path(folder, name);
    if (::mkdir(path.c_str(), 0777) != 0) throw_errno("make a folder to save into", path);
    FileDescriptor there = open_folder(path);
    if (!there.is_open() && errno != ENOENT) throw_errno("open the folder", path);
    if (!there.is_open()) continue;
    ::flock(there.get(), LOCK_EX | LOCK_NB);  // its failure is harmless on a file system without locks
    struct stat status = {};
    if (::fstat(there.get(), &status) != 0) throw_errno("examine", path);
    if (status.st_nlink > 0) return there;
  }
}

// Says whether what was asked for is not there, which is no trouble of this process.
bool is_absent(const std::error_code& error) {
  return error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
}

void remove_step(const std::string& folder, const std::string& path) {
  const std::string removed = temporary_path(folder, fs::path(path).filename().string());
  // Another job may have removed or replaced it meanwhile.
  if (std::rename(path.c_str(), removed.c_str()) != 0 && errno != ENOENT) throw_errno("remove", path);
  std::error_code ignored;
  fs::remove_all(removed, ignored);
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
  if (std::rename(path_.c_str(), target_.c_str()) == 0) {
    path_.clear();
  } else if (errno == EEXIST || errno == ENOTEMPTY) {
    // The other folder holds files. It gets the temporary name, under which the destructor removes it.
    if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) != 0) {
      throw std::invalid_argument(fmt::format(
          "'{}' is there, and its file system cannot exchange it for a new one: remove it, or save to another folder",
          target_));
    }
  } else {
    throw_errno("name the folder", target_);
  }
  sync_folder(folder_);
}

void keep_newest_steps(const std::string& folder, int64_t keep, int64_t saved) {
  if (keep <= 0) return;
  std::vector<std::string> superfluous;
  try {
    const std::map<int64_t, std::string> found = step_folders(folder);
    int64_t whole = 0;
    for (auto step = found.rbegin(); step != found.rend(); ++step) {
      if (whole < keep) {
        whole += is_whole_state(step->second) ? 1 : 0;
      } else if (step->first != saved) {
        superfluous.push_back(step->second);
      }
    }
  } catch (const std::system_error&) {
    return;  // the state is saved; the next save removes more
  }
  for (const std::string& path : superfluous) remove_step(folder, path);
}

}  // namespace tessera

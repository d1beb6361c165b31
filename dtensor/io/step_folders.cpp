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
#include <functional>
#include <optional>
#include <random>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/same_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kTemporary = ".tmp-";
constexpr const char* kRemoved = ".removed";
constexpr const char* kSavedByName = ".saved_by";
constexpr int64_t kMaxSavedByBytes = int64_t{1} << 24;

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

// Makes a folder, and those above it that are not there. Their names are written to disk: else they could be lost, with
// the states in them, when the power fails.
void make_folders(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> parents;  // of the folders that are not there
  for (fs::path path = fs::absolute(folder, error); path.has_relative_path() && !fs::exists(path, error);
       path = path.parent_path()) {
    parents.push_back(path.parent_path().string());
  }
  fs::create_directories(folder, error);
  if (!fs::is_directory(folder))
    throw std::runtime_error(fmt::format("cannot make the folder '{}': {}", folder, error.message()));
  for (const std::string& parent : parents) sync_folder(parent);
}

// Opens the file that is locked in the folder `path`, with more flags of open().
FileDescriptor open_lock(const std::string& path, int flags) {
  const std::string name = path + "/" + kSavedByName;
  return FileDescriptor(::open(name.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | flags, 0666));
}

// Removes the folder whose lock is `lock`, and releases that. It gets another temporary name first: a rank that cannot
// write into it then sees that it is gone, and not its files alone. On NFS a file that is open gets another name when
// it is removed, and keeps its folder until it is closed.
void remove_locked(const std::string& path, FileDescriptor& lock) {
  std::error_code ignored;
  const std::string removed = path + (path.ends_with(kRemoved) ? "" : kRemoved);  // it may have been begun before
  const std::string& there = std::rename(path.c_str(), removed.c_str()) == 0 ? removed : path;
  fs::remove_all(there, ignored);
  lock = FileDescriptor();
  fs::remove_all(there, ignored);
}

// Removes temporary folders that nobody has locked: their processes ended before they could. One without the file that
// is locked was left by a process that had begun to remove it, or is so new that its maker has not made that file: it
// finds the file there, and makes another folder.
void remove_abandoned(const std::string& folder) {
  std::error_code ignored;
  for (const auto& item : fs::directory_iterator(folder, ignored)) {
    if (!is_temporary(item.path().filename().string()) || !fs::is_directory(item.symlink_status(ignored))) continue;
    FileDescriptor there = open_lock(item.path().string(), 0);
    if (!there.is_open() && errno == ENOENT) there = open_lock(item.path().string(), O_CREAT | O_EXCL);
    if (there.is_open() && ::flock(there.get(), LOCK_EX | LOCK_NB) == 0) remove_locked(item.path().string(), there);
  }
}

// Returns what stands in the file ".saved_by": the job in one line, and the ranks in another.
std::string text_of(SavedBy by) {
  std::ranges::sort(by.ranks);
  return by.job.empty() ? "" : fmt::format("{}\n{}", by.job, fmt::join(by.ranks, ", "));
}

// Returns the text in a state's file ".saved_by"; "" where it cannot be read, as where another job has just removed the
// state.
std::string saved_by(const std::string& state) {
  try {
    return read_whole_file(state + "/" + kSavedByName, kMaxSavedByBytes);
  } catch (const std::exception&) {
    return "";
  }
}

// Throws where other ranks of the job that `own` names have saved `state`, whose name is `target` or was until now.
void check_replaceable(const std::string& state, const std::string& target, const std::string& own) {
  const std::string there = own.empty() ? "" : saved_by(state);
  const std::size_t line = own.find('\n') + 1;
  if (there.empty() || there == own || !there.starts_with(own.substr(0, line))) return;
  throw std::invalid_argument(
      fmt::format("ranks {} cannot save '{}', which ranks {} of this job have saved: one would replace the other's "
                  "state; give each mesh a folder of its own",
                  own.substr(line), target, there.substr(line)));
}

// Is how often a new name is tried, since a file system may fail to look at any.
constexpr int kMostTries = 100;

// Creates and locks a folder of a new name. Before it is locked, another job may take it for abandoned and remove it;
// then another one is made.
FileDescriptor create_locked(const std::string& folder, const std::string& name, std::string& path) {
  for (int tries = 0; tries < kMostTries; ++tries) {
    path = temporary_path(folder, name);
    if (::mkdir(path.c_str(), 0777) != 0) throw_errno("make a folder to save into", path);
    FileDescriptor there = open_lock(path, O_CREAT | O_EXCL);
    if (!there.is_open() && errno != ENOENT && errno != EEXIST) throw_errno("make a file in the folder", path);
    if (!there.is_open()) continue;
    // Another job that has the lock is about to remove the folder. Every other failure is harmless: there are file
    // systems without locks.
    const bool is_theirs = ::flock(there.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!is_theirs && names_file(path + "/" + kSavedByName, there.get())) return there;
  }
  throw_errno("lock the folder", path);
}

// Says whether what was asked for is not there, which is no trouble of this process.
bool is_absent(const std::error_code& error) {
  return error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
}

// Throws unless the file is there with this size.
void check_size(const std::string& path, int64_t saved) {
  std::error_code error;
  const auto bytes = static_cast<int64_t>(fs::file_size(path, error));
  if (error) throw std::system_error(error, fmt::format("cannot examine '{}'", path));
  if (bytes != saved)
    throw DamagedFile(fmt::format("'{}' has {} bytes, not the {} that were saved", path, bytes, saved));
}

// Removes an old state, unless another job has removed or replaced it meanwhile, or removes it too. Warns where it
// cannot be removed: the new one is saved in any case.
void remove_step(const std::string& folder, const std::string& path) {
  const std::string removed = temporary_path(folder, fs::path(path).filename().string());
  std::error_code error;
  if (std::rename(path.c_str(), removed.c_str()) == 0) {
    fs::remove_all(removed, error);
    if (is_absent(error) || error == std::errc::directory_not_empty) return;
  } else if (errno != ENOENT) {
    error = std::error_code(errno, std::generic_category());
  }
  if (!error) return;
  logger().warn("the old training state '{}' cannot be removed: {}; the next save tries again", path, error.message());
}

// Throws where other ranks of the job have saved `state`, after it has got its name `target` back by `back`. It is
// asked when the state has lost that name, since those ranks may have replaced an older one at the last moment.
void check_replaced(const std::string& state, const std::string& target, const std::string& own,
                    const std::function<void()>& back) {
  try {
    check_replaceable(state, target, own);
  } catch (const std::invalid_argument&) {
    back();
    throw;
  }
}

// Gives the folder `path` the name `target` where the file system cannot exchange names. Returns the hidden name that
// an older folder of that name has then.
std::string rename_in_turn(const std::string& path, const std::string& target, const std::string& by) {
  std::string hidden = temporary_path(folder_of(target), fs::path(target).filename().string());
  // Another job may have removed the older folder meanwhile.
  if (std::rename(target.c_str(), hidden.c_str()) != 0 && errno != ENOENT) throw_errno("rename the old folder", target);
  check_replaced(hidden, target, by, [&] { static_cast<void>(std::rename(hidden.c_str(), target.c_str())); });
  if (std::rename(path.c_str(), target.c_str()) != 0) {
    const int error = errno;
    static_cast<void>(std::rename(hidden.c_str(), target.c_str()));  // so that the older state stays
    errno = error;
    throw_errno("name the folder", target);
  }
  logger().warn("'{}' has been replaced by two renames, since its file system cannot exchange names", target);
  return hidden;
}

// Gives the folder `path` the name `target`. Returns the hidden name that a folder which had this name has then; "" if
// there was none.
std::string rename_or_exchange(const std::string& path, const std::string& target, const std::string& by,
                               ExchangeNames exchange) {
  while (true) {
    if (std::rename(path.c_str(), target.c_str()) == 0) return "";
    if (errno != EEXIST && errno != ENOTEMPTY) throw_errno("name the folder", target);
    check_replaceable(target, target, by);
    if (exchange(path.c_str(), target.c_str()) == 0) {
      check_replaced(path, target, by, [&] {
        if (exchange(path.c_str(), target.c_str()) != 0) static_cast<void>(std::rename(path.c_str(), target.c_str()));
      });
      return path;
    }
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return rename_in_turn(path, target, by);
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
    if (!step) continue;
    const bool is_folder = item.is_directory(error);
    if (error && !is_absent(error))
      throw std::system_error(error, fmt::format("cannot examine '{}'", item.path().string()));
    if (is_folder) found.emplace(*step, item.path().string());
  }
  return found;
}

void check_whole_state(const std::string& step_folder) {
  try {
    const std::string name = (fs::path(step_folder) / kManifestName).string();
    const StateManifest manifest = parse_state_manifest(read_state_manifest(step_folder), name);
    for (const auto& [file, checksums] : manifest.files)
      check_size((fs::path(step_folder) / file).string(), checksums.file_bytes);
  } catch (const OtherVersion&) {
    throw;
  } catch (const std::invalid_argument& error) {
    throw DamagedFile(error.what());
  } catch (const std::system_error& error) {
    if (!is_absent(error.code()) && !means_damage(error.code())) throw;
    throw DamagedFile(error.what());
  }
}

bool is_whole_state(const std::string& step_folder) {
  try {
    check_whole_state(step_folder);
    return true;
  } catch (const DamagedFile&) {
    return false;
  }
}

int exchange_names(const char* a, const char* b) { return ::renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE); }

NewStepFolder::NewStepFolder(const std::string& folder, int64_t step, const SavedBy& by)
    : folder_(folder), target_(folder + "/" + step_folder_name(step)), by_(text_of(by)) {
  make_folders(folder_);
  check_replaceable(target_, target_, by_);
  remove_abandoned(folder_);
  lock_ = create_locked(folder_, step_folder_name(step), path_);
  try {
    write_at(lock_, path_ + "/" + kSavedByName, 0, by_.data(), static_cast<int64_t>(by_.size()));
  } catch (...) {
    remove_locked(path_, lock_);
    throw;
  }
}

NewStepFolder::~NewStepFolder() {
  if (!path_.empty()) remove_locked(path_, lock_);
}

void NewStepFolder::publish(ExchangeNames exchange) {
  sync_folder(path_);
  // An older folder that holds files gets a hidden name, under which the destructor removes it.
  path_ = rename_or_exchange(path_, target_, by_, exchange);
  sync_folder(folder_);
}

namespace {

// Says whether a state is whole; nullopt where it is of another version of the format, which nobody here can judge.
std::optional<bool> is_whole_here(const std::string& path) {
  try {
    return is_whole_state(path);
  } catch (const OtherVersion&) {
    return std::nullopt;
  }
}

}  // namespace

void keep_newest_steps(const std::string& folder, int64_t keep, int64_t saved) {
  if (keep <= 0) return;
  try {
    std::vector<std::string> superfluous;
    const std::map<int64_t, std::string> found = step_folders(folder);
    int64_t whole = 0;
    for (auto step = std::make_reverse_iterator(found.upper_bound(saved)); step != found.rend(); ++step) {
      // One of another version is neither counted nor removed.
      const std::optional<bool> is_whole = is_whole_here(step->second);
      if (whole < keep) {
        whole += is_whole.value_or(false) ? 1 : 0;
      } else if (is_whole.has_value()) {
        superfluous.push_back(step->second);
      }
    }
    for (const std::string& path : superfluous) remove_step(folder, path);
  } catch (const std::exception&) {
    return;  // the state is saved; the next save removes more
  }
}

}  // namespace tessera

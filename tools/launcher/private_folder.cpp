#include "tessera/tools/launcher/private_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "tessera/mesh/core/same_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Other programs and other parts of Tessera make no folder with this beginning.
constexpr std::string_view kPrefix = "tessera-owned-";
constexpr std::string_view kPattern = "XXXXXX";

int open_folder(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

bool is_own_name(std::string_view name) {
  return name.starts_with(kPrefix) && name.size() == kPrefix.size() + kPattern.size();
}

void remove_if_abandoned(const std::string& path) {
  const int folder = open_folder(path);
  if (folder < 0) return;
  struct stat found = {};
  const bool is_own = ::fstat(folder, &found) == 0 && found.st_uid == ::geteuid();
  std::error_code ignored;
  if (is_own && ::flock(folder, LOCK_EX | LOCK_NB) == 0 && names_file(path, folder)) fs::remove_all(path, ignored);
  ::close(folder);
}

}  // namespace

std::string temporary_folder() {
  for (const char* name : {"TEST_TMPDIR", "TMPDIR"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "/tmp";
}

PrivateFolder::PrivateFolder(const std::string& parent) {
  // Another process may remove the folder as abandoned before it is locked; it holds the lock while it does so. Then
  // another folder is made.
  do {
    if (lock_ >= 0) ::close(lock_);
    path_ = fmt::format("{}/{}{}", parent, kPrefix, kPattern);
    if (::mkdtemp(path_.data()) == nullptr) {
      throw std::runtime_error(fmt::format("no folder can be made in {} ({}); set TMPDIR to one that can be written",
                                           parent, std::strerror(errno)));
    }
    lock_ = open_folder(path_);
    while (lock_ >= 0 && ::flock(lock_, LOCK_EX) != 0 && errno == EINTR) continue;
  } while (lock_ < 0 ? errno == ENOENT : !names_file(path_, lock_));
}

PrivateFolder::~PrivateFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

void remove_abandoned_folders(const std::string& parent) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, ignored)) {
    if (is_own_name(entry.path().filename().string())) remove_if_abandoned(entry.path().string());
  }
}

}  // namespace tessera

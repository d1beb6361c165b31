#include "tessera/tools/launcher/private_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "tessera/mesh/core/same_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPattern = "XXXXXX";

// Returns how the names of this host's folders begin: other programs and other parts of Tessera make no such folder.
// The host has eight digits in it, so that paths have one length and stay short.
std::string own_prefix() {
  std::array<char, 256> host{};
  const std::string name = ::gethostname(host.data(), host.size() - 1) == 0 ? host.data() : "";
  return fmt::format("tessera-owned-{:08x}-", static_cast<uint32_t>(std::hash<std::string>()(name)));
}

int open_folder(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
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
    path_ = fmt::format("{}/{}{}", parent, own_prefix(), kPattern);
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
  const std::string prefix = own_prefix();
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, ignored)) {
    const std::string name = entry.path().filename().string();
    const bool is_own = name.starts_with(prefix) && name.size() == prefix.size() + kPattern.size();
    if (is_own) remove_if_abandoned(entry.path().string());
  }
}

}  // namespace tessera

#include "tessera/tools/launcher/reserved_notes.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr off_t kReservedBytes = 128;

std::string part_of(const std::string& path) { return path + ".part"; }

// Returns 0 or the system's error.
int reserve(const std::string& file) {
  const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return errno;
  const int reason = ::posix_fallocate(fd, 0, kReservedBytes);
  ::close(fd);
  return reason;
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

}  // namespace

ReservedNotes::ReservedNotes(std::vector<std::string> paths) : paths_(std::move(paths)) {
  for (const std::string& path : paths_) {
    std::remove(path.c_str());
    const int reason = reserve(part_of(path));
    if (reason == 0) continue;
    remove_parts();
    throw std::runtime_error(fmt::format(
        "{} bytes cannot be reserved in {} for the note of a rank that ends: {}; free some space, or set TMPDIR to "
        "another file system",
        kReservedBytes, part_of(path), std::strerror(reason)));
  }
}

ReservedNotes::~ReservedNotes() { remove_parts(); }

void ReservedNotes::remove_parts() const {
  for (const std::string& path : paths_) std::remove(part_of(path).c_str());
}

// The reserved file is not truncated before it is written, since its space would be given back.
bool ReservedNotes::write(const std::string& path, std::string_view text) {
  const int fd = ::open(part_of(path).c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return false;
  const bool is_written = write_all(fd, text) && ::ftruncate(fd, static_cast<off_t>(text.size())) == 0;
  const bool is_whole = ::close(fd) == 0 && is_written;
  return is_whole && std::rename(part_of(path).c_str(), path.c_str()) == 0;
}

}  // namespace tessera

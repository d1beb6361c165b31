#include "tessera/mesh/folder_store.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/mesh/core/poll.h"
#include "tessera/mesh/core/stable_hash.h"

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr std::string_view kHeader = "tessera store";
constexpr std::size_t kLongestName = 160;  // of a key; the version and the hash need some of the 255 bytes
constexpr int64_t kReservedBytes = 4096;
constexpr int kReserves = 3;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

// Returns a file name for a key, which may have any length and any characters.
std::string name_of(const std::string& key) {
  std::string name;
  for (const char c : key) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_';
    name += plain ? std::string(1, c) : fmt::format("%{:02x}", static_cast<unsigned char>(c));
  }
  if (name.size() <= kLongestName) return name;
  return fmt::format("{}~{:016x}", name.substr(0, kLongestName), stable_hash(key));
}

std::string file_of(const std::string& key, int64_t version) { return fmt::format("{}@{}", name_of(key), version); }

// Returns the whole content of a file: a line with the sizes and a checksum, the key, and the value.
std::string encode(const std::string& key, const std::optional<Bytes>& value) {
  std::string body = key;
  if (value) body.append(value->begin(), value->end());
  return fmt::format("{} {} {} {} {:016x}\n{}", kHeader, key.size(), value ? value->size() : 0,
                     value ? "set" : "deleted", stable_hash(body), body);
}

std::optional<std::optional<Bytes>> decode(const std::string& key, const std::string& content) {
  const std::size_t line = content.find('\n');
  if (line == std::string::npos) return std::nullopt;
  const std::string body = content.substr(line + 1);
  if (!body.starts_with(key)) return std::nullopt;
  const Bytes value(body.begin() + static_cast<std::ptrdiff_t>(key.size()), body.end());
  if (content == encode(key, value)) return value;
  if (content == encode(key, std::nullopt)) return std::optional<Bytes>();
  return std::nullopt;
}

// Writes all of `content`; returns 0 or the system's error.
int write_all(int fd, std::string_view content) {
  while (!content.empty()) {
    const ssize_t count = ::write(fd, content.data(), content.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    content.remove_prefix(static_cast<std::size_t>(count));
  }
  return 0;
}

// Renames a file unless the new name is taken; returns 0 or the system's error. Where the file system cannot do that in
// one step, it links the file, which needs space for a name.
int give_name(int folder, const std::string& from, const std::string& to) {
  if (::renameat2(folder, from.c_str(), folder, to.c_str(), RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  if (::linkat(folder, from.c_str(), folder, to.c_str(), 0) != 0) return errno;
  ::unlinkat(folder, from.c_str(), 0);
  return 0;
}

uint64_t random_number() {
  std::random_device source;
  return (static_cast<uint64_t>(source()) << 32) | source();
}

int64_t number_in(const Bytes& value) {
  return value.empty() ? 0 : std::stoll(std::string(value.begin(), value.end()));
}

}  // namespace

FolderStore::FolderStore(std::string path, std::chrono::milliseconds timeout,
                         std::function<bool(const std::string&)> is_vital)
    : Store(timeout), id_(random_number()), folder_(std::move(path), timeout), is_vital_(std::move(is_vital)) {
  try {
    need_reserves();
  } catch (const std::exception&) {  // NOLINT: the first write says why
  }
}

FolderStore::~FolderStore() {
  for (const Reserve& each : reserves_) {
    ::close(each.fd);
    ::unlinkat(folder_.descriptor(), each.name.c_str(), 0);
  }
}

// A program may have freed meanwhile what this rank lacked.
void FolderStore::need_reserves() {
  const std::lock_guard lock(mutex_);
  if (!is_poor_) return;
  while (reserves_.size() < kReserves) reserve();
  is_poor_ = false;
}

c10::intrusive_ptr<c10d::Store> FolderStore::clone() {
  throw std::runtime_error("FolderStore: it is not copied; share it, since all its calls may run at once");
}

void FolderStore::fail(const std::string& what, int reason) const {
  if (!folder_.is_there()) {
    throw std::runtime_error(fmt::format(
        "the store's folder {} has been removed; keep it until all ranks of the job have ended", folder_.path()));
  }
  throw std::runtime_error(fmt::format(
      "{} in the store's folder {}: {}{}", what, folder_.path(), std::strerror(reason),
      reason == ENOSPC
          ? "; free some space, or set TMPDIR, or TESSERA_STORE where you have set it, to another file system"
          : ""));
}

// A name that begins with a dot is no key's.
std::string FolderStore::new_name() { return fmt::format(".{:x}.{}", id_, next_name_++); }

// The file stays open, so that a process that has no descriptor left can still use it.
void FolderStore::reserve() {
  const std::string name = new_name();
  const int fd = ::openat(folder_.descriptor(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) fail("cannot make a file", errno);
  if (const int reason = ::posix_fallocate(fd, 0, kReservedBytes); reason != 0) {
    ::close(fd);
    ::unlinkat(folder_.descriptor(), name.c_str(), 0);
    fail("cannot reserve space", reason);
  }
  reserves_.push_back({.name = name, .fd = fd});
}

std::optional<std::string> FolderStore::write_into_reserve(const std::string& content) {
  if (content.size() > static_cast<std::size_t>(kReservedBytes)) return std::nullopt;
  Reserve taken;
  {
    const std::lock_guard lock(mutex_);
    if (reserves_.empty()) return std::nullopt;
    taken = reserves_.back();
    reserves_.pop_back();
  }
  const Descriptor file(taken.fd);
  if (write_all(file.get(), content) != 0) return std::nullopt;
  if (::ftruncate(file.get(), static_cast<off_t>(content.size())) != 0) return std::nullopt;
  return taken.name;
}

// Returns the name of a new file, which is no key's yet.
std::string FolderStore::write_file(const std::string& key, const std::string& content) {
  std::string name = new_name();
  int reason = 0;
  {
    const Descriptor file(::openat(folder_.descriptor(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    reason = file.get() < 0 ? errno : write_all(file.get(), content);
  }
  if (reason == 0) return name;
  ::unlinkat(folder_.descriptor(), name.c_str(), 0);
  if (is_vital_ && is_vital_(key)) {
    if (const std::optional<std::string> reserved = write_into_reserve(content)) return *reserved;
  }
  fail(fmt::format("cannot write '{}'", key), reason);
}

int64_t FolderStore::newest_version(const std::string& key) {
  int64_t version = 0;
  {
    const std::lock_guard lock(mutex_);
    version = newest_[key];
  }
  const int64_t before = version;
  while (::faccessat(folder_.descriptor(), file_of(key, version + 1).c_str(), F_OK, 0) == 0) ++version;
  if (version == before) return version;
  const std::lock_guard lock(mutex_);
  newest_[key] = std::max(newest_[key], version);
  return version;
}

FolderStore::Value FolderStore::read(const std::string& key, int64_t version) const {
  if (version == 0) return std::nullopt;
  const std::string name = file_of(key, version);
  const Descriptor file(::openat(folder_.descriptor(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (file.get() < 0) fail(fmt::format("cannot read '{}'", key), errno);
  std::string content;
  char part[4096];
  for (ssize_t count = 0; (count = ::read(file.get(), part, sizeof(part))) != 0;) {
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(fmt::format("cannot read '{}'", key), errno);
    content.append(part, static_cast<std::size_t>(count));
  }
  if (const auto value = decode(key, content)) return *value;
  throw std::runtime_error(fmt::format(
      "the store's file {}/{} is damaged: it does not hold what a rank wrote; start the job again in another folder",
      folder_.path(), name));
}

std::optional<FolderStore::Value> FolderStore::update(
    const std::string& key, const std::function<std::optional<Value>(const Value&)>& value_of) {
  if (!is_vital_ || !is_vital_(key)) need_reserves();
  while (true) {
    const int64_t version = newest_version(key);
    std::optional<Value> wanted = value_of(read(key, version));
    if (!wanted) return wanted;
    const std::string name = write_file(key, encode(key, *wanted));
    const int reason = give_name(folder_.descriptor(), name, file_of(key, version + 1));
    if (reason == 0) return wanted;
    ::unlinkat(folder_.descriptor(), name.c_str(), 0);
    if (reason != EEXIST) fail(fmt::format("cannot write '{}'", key), reason);
  }
}

void FolderStore::set(const std::string& key, const Bytes& value) {
  update(key, [&](const Value&) { return std::optional<Value>(value); });
}

Bytes FolderStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  Value there;
  const auto changed = update(key, [&](const Value& now) -> std::optional<Value> {
    there = now;
    if (now ? *now == expected : expected.empty()) return desired;
    return std::nullopt;
  });
  return changed ? desired : there.value_or(expected);
}

int64_t FolderStore::add(const std::string& key, int64_t value) {
  int64_t sum = 0;
  update(key, [&](const Value& now) {
    sum = number_in(now.value_or(Bytes())) + value;
    const std::string text = std::to_string(sum);
    return std::optional<Value>(Bytes(text.begin(), text.end()));
  });
  return sum;
}

bool FolderStore::deleteKey(const std::string& key) {
  const auto changed =
      update(key, [](const Value& now) { return now ? std::optional<Value>(Value()) : std::optional<Value>(); });
  return changed.has_value();
}

bool FolderStore::check(const std::vector<std::string>& keys) {
  const bool all =
      std::ranges::all_of(keys, [&](const std::string& key) { return read(key, newest_version(key)).has_value(); });
  if (!all && !folder_.is_there()) fail("", 0);
  return all;
}

Bytes FolderStore::get(const std::string& key) {
  wait({key});
  const Value value = read(key, newest_version(key));
  if (!value) throw std::runtime_error(fmt::format("the store's key '{}' has been deleted meanwhile", key));
  return *value;
}

int64_t FolderStore::getNumKeys() {
  std::map<std::string, std::pair<int64_t, std::string>> newest;  // name -> its newest version and that file
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
    const std::string file = entry.path().filename();
    const std::size_t at = file.rfind('@');
    if (at == std::string::npos) continue;
    const int64_t version = std::stoll(file.substr(at + 1));
    auto& known = newest[file.substr(0, at)];
    if (version > known.first) known = {version, file};
  }
  return std::ranges::count_if(newest, [&](const auto& each) {
    const Descriptor file(::openat(folder_.descriptor(), each.second.second.c_str(), O_RDONLY | O_CLOEXEC));
    char line[128] = {};
    const ssize_t count = ::read(file.get(), line, sizeof(line) - 1);
    return count > 0 && std::string_view(line).find(" deleted ") == std::string_view::npos;
  });
}

void FolderStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  if (poll_until(std::chrono::steady_clock::now() + timeout, [&] { return check(keys); })) return;
  throw std::runtime_error(
      fmt::format("timed out after {} ms waiting in the store for {}", timeout.count(), fmt::join(keys, ", ")));
}

}  // namespace tessera

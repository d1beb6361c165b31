#pragma once

#include <set>
#include <string>

namespace tessera {

// Notes the files and folders that this process writes to disk by fsync() for as long as it lives.
class SyncedPaths {
 public:
  SyncedPaths();
  ~SyncedPaths();
  SyncedPaths(const SyncedPaths&) = delete;
  SyncedPaths& operator=(const SyncedPaths&) = delete;

  bool has(const std::string& path) const;

  // Is what fsync() calls.
  void note(int fd);

 private:
  std::set<std::string> paths_;
};

}  // namespace tessera

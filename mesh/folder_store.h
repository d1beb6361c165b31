#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/job_folder.h"

namespace tessera {

// Is a store for the ranks of one host, in a JobFolder. c10d's FileStore appends to one file under a lock: a rank that
// is killed there, or stopped while it holds the lock, makes the others wait for ever.
//
// Each value is a file of its own, KEY@VERSION, which appears whole or not at all: it is written under another name and
// then renamed, which fails if the version is there already, so compareSet and add need no lock. The newest version
// counts; older ones stay.
//
// Invariants:
//   - No call waits for another process, but get() and wait(), which end after the timeout.
//   - A file that is not whole, as after a failure of the disk, is an error that names it.
//
// All calls throw std::runtime_error with the system's reason. Several threads may use one at once.
class FolderStore : public c10d::Store {
 public:
  // Makes the folder, or joins those that are in it (see JobFolder). The keys for which `is_vital` returns true can be
  // written on a full disk and without a free file descriptor too, three times: this call reserves what that needs.
  // Where it cannot, the store still takes those keys, as far as there is space, so that a rank can say what it lacks;
  // writing any other key tries to reserve again, and throws the reason where that fails.
  FolderStore(std::string path, std::chrono::milliseconds timeout, std::function<bool(const std::string&)> is_vital);
  ~FolderStore() override;

  const std::string& path() const { return folder_.path(); }

  using Store::compareSet;
  using Store::set;

  // Throws std::runtime_error: a second user of the folder in one process would hide the first one's end.
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  // Sets the key to `desired` if its value is `expected`, where a missing key counts as empty. Returns `desired` then,
  // else the value that is there, or `expected` for a missing key.
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  using Value = std::optional<std::vector<uint8_t>>;  // nullopt: the key has been deleted

  int64_t newest_version(const std::string& key);
  // Returns the value of one version; version 0 is that of a key that was never set.
  Value read(const std::string& key, int64_t version) const;
  // Adds a version that holds `value_of(value now)`, or none if that returns nullopt. Returns what it returned.
  std::optional<Value> update(const std::string& key,
                              const std::function<std::optional<Value>(const Value&)>& value_of);
  std::string new_name();
  std::string write_file(const std::string& key, const std::string& content);
  std::optional<std::string> write_into_reserve(const std::string& content);
  void reserve();
  void need_reserves();
  [[noreturn]] void fail(const std::string& what, int reason) const;

  struct Reserve {
    std::string name;
    int fd = -1;
  };

  const uint64_t id_;  // tells this store's files from those of others
  const JobFolder folder_;
  const std::function<bool(const std::string&)> is_vital_;
  std::mutex mutex_;                       // guards newest_ and reserves_
  std::map<std::string, int64_t> newest_;  // the newest version that this process has seen of each key
  std::vector<Reserve> reserves_;          // open files with allocated space
  bool is_poor_ = true;                    // it has never had all of them
  std::atomic<int64_t> next_name_{0};
};

}  // namespace tessera

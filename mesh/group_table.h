#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "tessera/mesh/backend_group.h"
#include "tessera/mesh/failure.h"

namespace tessera {

// The process groups of one World, made on demand, and the watch over them: a thread that looks a few times a second whether
// the job has failed elsewhere and then closes the groups, so that ranks that wait for this one end. It touches nothing while
// the job is well.
//
// Groups are never closed under a collective of this rank: Gloo wakes a waiting thread when the other end of a connection
// closes, not when its own does. Such a rank waits, maybe through others, for one that is in no collective; that one's watch
// closes its groups, and the failure runs back along the chain.
class GroupTable {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    std::shared_ptr<FailureBoard> board;
    int64_t rank = 0;
    std::chrono::milliseconds timeout = std::chrono::minutes(5);
    bool one_host = false;
    int device_index = 0;
    bool fake = false;
    MakeGroup make_group;        // empty: NCCL for CUDA tensors, else Gloo
    std::function<bool()> busy;  // whether another thread of this rank is in a collective now
  };
  explicit GroupTable(Options options);
  ~GroupTable();
  GroupTable(const GroupTable&) = delete;
  GroupTable& operator=(const GroupTable&) = delete;

  // The group of `ranks`, this rank among them; collective over them at first use. Throws what making it throws.
  c10::intrusive_ptr<c10d::Backend> get(const std::vector<int64_t>& ranks, c10::DeviceType device);
  // Closes every group of a failed world; false when another thread is in a collective: the watch then does it as soon as
  // that one has come out.
  bool close_all() noexcept;

 private:
  using Key = std::pair<c10::DeviceType, std::vector<int64_t>>;
  BackendGroup make(const Key& key) const;
  void watch(const std::stop_token& stop);

  const Options options_;
  std::mutex mutex_;  // guards groups_; never held while a group is made
  std::map<Key, BackendGroup> groups_;
  std::jthread watcher_;
};

}  // namespace tessera

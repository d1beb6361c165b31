#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/Device.h>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/backends/cpu_backend.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/group_options.h"

namespace tessera {

// The process groups of one World, made on demand, and the watch over them: a thread that looks a few times a second
// whether the job has failed elsewhere and then closes the groups, so that ranks that wait for this one end. It touches
// nothing while the job is well.
//
// Groups are never closed under a collective of this rank: Gloo wakes a waiting thread when the other end of a
// connection closes, not when its own does (MPI asks GroupRequest::lost while it waits). Such a rank waits, maybe
// through others, for one that is in no collective; that one's watch closes its groups, and the failure runs back along
// the chain.
class GroupTable {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    std::shared_ptr<FailureBoard> board;
    int64_t rank = 0;
    int64_t size = 1;
    std::chrono::milliseconds timeout = std::chrono::minutes(5);
    bool one_host = false;
    int device_index = 0;
    bool fake = false;
    CpuBackend cpu_backend = CpuBackend::kGloo;
    MakeGroup make_group;        // in the place of cpu_backend and NCCL
    std::function<bool()> busy;  // whether another thread of this rank is in a collective now
  };
  explicit GroupTable(Options options);
  ~GroupTable();
  GroupTable(const GroupTable&) = delete;
  GroupTable& operator=(const GroupTable&) = delete;

  // What the backend of CPU tensors needs before any group: MPI is started by all ranks of the world together. Nothing
  // for Gloo, a fake world, or a world of one. Throws what the backend throws.
  void start();
  // `options` without what groups of this table have anyhow, so that groups that are alike are one. Throws
  // std::invalid_argument on a backend that `device` does not have, naming those it has, and a timeout that is not
  // positive.
  GroupOptions normalized(GroupOptions options, c10::DeviceType device) const;
  // The group of `ranks`, this rank among them, with options from normalized(); collective over them at first use.
  // Throws what making it throws.
  c10::intrusive_ptr<c10d::Backend> get(const std::vector<int64_t>& ranks, c10::DeviceType device,
                                        const GroupOptions& options);
  // From now on `backend` is the group of `ranks` with default options.
  void adopt(const std::vector<int64_t>& ranks, c10::DeviceType device, c10::intrusive_ptr<c10d::Backend> backend);
  // How many groups there are.
  std::size_t size() const;
  // Closes every group of a failed world; false when another thread is in a collective: the watch then does it as soon
  // as that one has come out.
  bool close_all() noexcept;
  // Ends the watch, until a group is asked for again.
  void end_watch();

 private:
  struct Key {
    c10::DeviceType device;
    std::vector<int64_t> ranks;
    GroupOptions options;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  BackendGroup make(const Key& key) const;
  BackendGroup make_cpu_group(const GroupRequest& request, const std::string& backend) const;
  GroupRequest request(const std::string& prefix, const std::vector<int64_t>& ranks, const GroupOptions& options,
                       c10::DeviceType device) const;
  void start_watch(const std::vector<int64_t>& ranks);
  void watch(const std::stop_token& stop);

  const Options options_;
  mutable std::mutex mutex_;  // guards groups_; never held while a group is made
  std::map<Key, BackendGroup> groups_;
  std::jthread watcher_;
};

}  // namespace tessera

#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/Device.h>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/backends/cpu_backend.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/group_options.h"

namespace tessera {

class OrderlyEnd;

// Makes and keeps the process groups of one World. A watch thread checks a few times per second whether the job has
// failed on another rank; if so it closes the groups, so that ranks that wait for this one stop waiting. It fails the
// job itself where a call of a collective lasts longer than any group's limit: NCCL makes connections on the host when
// a collective first needs them, and has no limit for that.
//
// Invariants:
//   - A group is not closed while this rank is in a collective, unless BackendGroup::closes_while_busy, as those of
//     Gloo, NCCL and threads. A rank that waits over MPI ends by GroupRequest::lost, which MPI's waits call.
//   - get() with the same ranks, device and normalized options gives the same group, until adopt() replaces it.
//   - The mutex is never held while a group is made.
class GroupTable {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    std::shared_ptr<FailureBoard> board;
    int64_t rank = 0;
    int64_t size = 1;
    std::chrono::milliseconds timeout = std::chrono::minutes(5);
    bool one_host = false;
    std::function<c10::Device(c10::DeviceType)> device_of = [](c10::DeviceType type) { return c10::Device(type); };
    bool fake = false;
    CpuBackend cpu_backend = CpuBackend::kGloo;
    bool gloo_for_cuda = false;
    MakeGroup make_group;        // when set, makes the groups instead of cpu_backend and NCCL
    std::function<bool()> busy;  // returns whether another thread of this rank is in a collective
    // Return how long it has been in one call of it, and in which operator.
    std::function<std::chrono::milliseconds()> busy_for = [] { return std::chrono::milliseconds::zero(); };
    std::function<std::string()> busy_in = [] { return std::string(); };
    std::function<void()> on_failure;  // called by the watch when it has acknowledged a failure that it found
  };
  explicit GroupTable(Options options);
  ~GroupTable();
  GroupTable(const GroupTable&) = delete;
  GroupTable& operator=(const GroupTable&) = delete;

  // Starts the backend of CPU tensors: over MPI all ranks of the world start MPI together. Does nothing for Gloo, in a
  // fake world, and in a world of one rank. Throws what the backend throws.
  void start();
  // Returns `options` without those that equal the world's defaults, so that equal groups have equal options. Throws
  // std::invalid_argument on a backend that is not available for `device`, naming the available ones, and on a timeout
  // that is not positive.
  GroupOptions normalized(GroupOptions options, c10::DeviceType device) const;
  // Returns the group of `ranks`, which must include this rank; `options` come from normalized(). The first call makes
  // the group, collectively over `ranks`. Throws what the backend throws, and std::runtime_error when the job has
  // failed.
  c10::intrusive_ptr<c10d::Backend> get(const std::vector<int64_t>& ranks, c10::DeviceType device,
                                        const GroupOptions& options);
  // Makes `backend` the group of `ranks` with default options, from now on.
  void adopt(const std::vector<int64_t>& ranks, c10::DeviceType device, c10::intrusive_ptr<c10d::Backend> backend);
  // Returns the number of groups.
  std::size_t size() const;
  // Returns an error about a group that its backend has aborted by itself, if there is one, with the group's ranks as
  // those that it waited for. Cheap where no backend does so.
  std::optional<WaitError> aborted() const;
  // Closes the groups of a failed world, those that close while this rank is busy all at once. Returns false when some
  // had to stay open, because another thread is in a collective: the watch then closes them as soon as that thread is
  // done.
  bool close_all() noexcept;
  // Waits for what this rank has queued on a device, unless the job has failed, for at most the limit of one group.
  // Returns the text of an error by which this rank's own process or device fails, such as a failed check on a GPU, or
  // "": other errors are a peer's.
  std::string drain() noexcept;
  // Ends the watch thread and then the groups, unless the job has failed; where drain() was late, breaks them off.
  // Warns of a group that its backend has aborted. The World that has this table calls it after drain(), and uses its
  // groups no more.
  void end() noexcept;
  // Ends the watch thread, until the next group is made.
  void end_watch();

 private:
  struct Key {
    c10::DeviceType device;
    std::vector<int64_t> ranks;
    GroupOptions options;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  BackendGroup make(const Key& key) const;
  void throw_if_mixed() const;
  BackendGroup make_cpu_group(const GroupRequest& request, const std::string& backend) const;
  bool is_over_mpi() const;
  static BackendGroup make_in_time(const GroupRequest& request, BackendGroup (*make_group)(const GroupRequest&));
  GroupRequest request(const std::string& prefix, const std::vector<int64_t>& ranks, const GroupOptions& options,
                       c10::DeviceType device) const;
  std::string drain_one(const BackendGroup& group) noexcept;
  // Calls a function of the group, if it ends in order and the job has not failed. Returns the text of its error, or
  // "".
  std::string end_one(const BackendGroup& group, void (OrderlyEnd::*step)()) noexcept;
  void start_watch(const std::vector<int64_t>& ranks);
  void close_after_failure(const std::stop_token& stop);
  std::optional<Failure> find_late_call() const;

  const Options options_;
  std::atomic<bool> is_late_{false};  // a group did not end within its limit
  mutable std::mutex mutex_;          // guards what follows; never held while a group is made
  std::map<Key, BackendGroup> groups_;
  // The longest limit of the groups that have one of their own: of those of get() also while they are made.
  std::chrono::milliseconds longest_limit_{0};
  std::atomic<bool> some_abort_themselves_{false};  // whether a group has had BackendGroup::aborted
  std::jthread watcher_;
  bool ended_ = false;
};

}  // namespace tessera

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "tessera/mesh/backends/backend_group.h"

namespace tessera {

class Rendezvous;

// Keeps the groups of an in-process world, by their ranks and device type. The Worlds of all its ranks share one hub.
// Any thread may call its functions.
class ThreadHub {
 public:
  // Returns the group of `ranks` for tensors on `device`; the first call makes it.
  std::shared_ptr<Rendezvous> rendezvous(const std::vector<int64_t>& ranks, c10::Device device);
  // Says that this rank will not communicate again, in any group. Ranks that wait for it get an error.
  void leave(int64_t rank);

 private:
  std::mutex mutex_;
  using Key = std::pair<std::vector<int64_t>, c10::DeviceType>;
  std::map<Key, std::shared_ptr<Rendezvous>> rendezvous_of_;
  std::set<int64_t> left_;
};

// Makes a c10d::Backend for ranks that are threads of one process and share its memory. It has broadcast, allreduce,
// reduce, allgather, gather, scatter, reduce_scatter, alltoall (each in all its forms except the coalesced ones), send,
// recv and barrier, for every dtype that ATen can copy. Reductions are in the order of ranks. If ranks disagree on
// operation, reduction, dtype or counts, wait() throws MismatchError on all of them. A send is done when its message
// has been received; works may be waited for in any order.
//
// Tensors are on the CPU, or all on one GPU, `request.device_index`. There wait() makes the current stream wait for the
// result and does not block the host for it.
BackendGroup make_thread_group(const std::shared_ptr<ThreadHub>& hub, const GroupRequest& request);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "tessera/mesh/backends/backend_group.h"

namespace tessera {

class Rendezvous;

// Keeps the groups of an in-process world, by their ranks. The Worlds of all its ranks share one hub. Any thread may
// call its functions.
class ThreadHub {
 public:
  // Returns the group of `ranks`; the first call makes it.
  std::shared_ptr<Rendezvous> rendezvous(const std::vector<int64_t>& ranks);
  // Says that this rank will not communicate again, in any group. Ranks that wait for it get an error.
  void leave(int64_t rank);

 private:
  std::mutex mutex_;
  std::map<std::vector<int64_t>, std::shared_ptr<Rendezvous>> rendezvous_of_;
  std::set<int64_t> left_;
};

// Makes a c10d::Backend for ranks that are threads of one process and share its memory. It has broadcast, allreduce,
// reduce, allgather, gather, scatter, reduce_scatter, alltoall (each in all its forms except the coalesced ones), send,
// recv and barrier, for every dtype that ATen can copy. Reductions are in the order of ranks. If ranks disagree on
// operation, reduction, dtype or counts, wait() throws MismatchError on all of them. A send is done when its message
// has been received; works may be waited for in any order.
//
// Throws std::invalid_argument for CUDA tensors, since it only copies CPU memory.
BackendGroup make_thread_group(const std::shared_ptr<ThreadHub>& hub, const GroupRequest& request);

}  // namespace tessera

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

// The groups of an in-process world, found by their ranks. Each rank's World shares it.
class ThreadHub {
 public:
  // The one for `ranks`, made by whoever asks first.
  std::shared_ptr<Rendezvous> rendezvous(const std::vector<int64_t>& ranks);
  // This rank will not come to any group again: those that wait for it get an error.
  void leave(int64_t rank);

 private:
  std::mutex mutex_;
  std::map<std::vector<int64_t>, std::shared_ptr<Rendezvous>> rendezvous_of_;
  std::set<int64_t> left_;
};

// A c10d::Backend over memory that the ranks, threads of one process, share. It has broadcast, allreduce, reduce,
// allgather, gather, scatter, reduce_scatter, alltoall (each in all its forms but the coalesced ones), send, recv and
// barrier, for every dtype that ATen copies; reductions go in the order of ranks. Ranks that disagree on operation,
// reduction, dtype or counts all get MismatchError when they wait. A send is done when its message was received; works
// may be waited for in any order.
//
// Throws std::invalid_argument for CUDA tensors: threads share the CPU's memory.
BackendGroup make_thread_group(const std::shared_ptr<ThreadHub>& hub, const GroupRequest& request);

}  // namespace tessera

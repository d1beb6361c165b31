#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

// A wait for other ranks has failed.
struct WaitError : std::runtime_error {
  enum class Cause {
    kTimeout,
    kLeft,  // over MPI, a process has come to its end; a rank that is a thread has returned, or its World is gone
    kLost,  // GroupRequest::lost returned true, or the backend has failed
  };
  WaitError(Cause why, const std::string& text, std::vector<int64_t> for_ranks)
      : runtime_error(text), cause(why), awaited(std::move(for_ranks)) {}

  Cause cause;
  std::vector<int64_t> awaited;  // global ranks that had not yet sent, or not yet received
};

// Holds a c10d backend and the function that aborts it.
struct BackendGroup {
  c10::intrusive_ptr<c10d::Backend> backend;
  // Makes the current collective of the other members, and every later one, fail at once. Over MPI it affects only this
  // rank's collectives; the other ranks see the failure by GroupRequest::lost. Do not call it while this rank is in a
  // collective, which might then wait until its time limit. Any thread may call it, any number of times; it never
  // throws.
  std::function<void()> close;
  // Says whether close() may also be called while this rank is in a collective, which then ends.
  bool closes_while_busy = false;
  // Says whether the backend has aborted the group by itself, and why: values of its collectives may then be wrong
  // without an error of theirs. It is empty for backends that never do. Any thread may call it; it is cheap, and never
  // throws.
  std::function<std::optional<WaitError::Cause>()> aborted = {};
};

// Describes the process group that a backend is to make.
struct GroupRequest {
  c10::intrusive_ptr<c10d::Store> store;  // used by this group only
  int rank = 0;                           // this rank's position in the group
  int size = 1;
  std::vector<int64_t> ranks;  // the members' global ranks, in the group's order
  c10::DeviceType device = c10::DeviceType::CPU;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  bool one_host = false;  // all ranks are on one host: the backend must listen on the loopback interface only
  int device_index = -1;  // this rank's CUDA device; -1 for tensors on the CPU
  // Returns whether the job has failed or the process of one of `awaited` (global ranks) has ended. A backend whose
  // waits do not notice that themselves calls it a few times per second, with the ranks that it waits for: other ranks
  // may have ended because they had finished their part.
  std::function<bool(const std::vector<int64_t>& awaited)> lost = [](const std::vector<int64_t>&) { return false; };
};

// A World calls this function, which a user gives as WorldOptions::make_group, to make its groups. The call is
// collective over the group and may throw. The result needs `backend` and `close`, which wrap_group() sets. Of the
// backend the library calls getBackendName, allgather, _allgather_base, alltoall_base (also with splits of different
// sizes), broadcast, scatter and barrier, for tensors of bytes; and allreduce and _reduce_scatter_base for every dtype
// and every c10d::ReduceOp of a dtype but PREMUL_SUM.
using MakeGroup = std::function<BackendGroup(const GroupRequest&)>;

// The functions below make a group, collectively over its members; each throws what the backend throws.
//
// make_gloo_group makes the process ignore SIGPIPE unless it has a handler for it, so that a lost peer causes an error
// and does not kill the process.
BackendGroup make_gloo_group(const GroupRequest& request);
// Wraps a backend that the caller has made. close() closes the connections of a Gloo group, and calls abort() of any
// other. For NCCL's there is wrap_nccl_group() in nccl_group.h. A backend whose getBackendName() is "gloo" is used as
// Gloo's: some collectives are then made of its send and recv.
BackendGroup wrap_group(c10::intrusive_ptr<c10d::Backend> backend);
// Makes an MPI communicator of the members. start_mpi() must have been called.
BackendGroup make_mpi_group(const GroupRequest& request);
// Makes a group that moves nothing, like c10d's fake group.
BackendGroup make_fake_group(int rank, int size);

// Returns the MPI that this build has: "Open MPI", "MPICH", "another MPI", or "" for none.
std::string_view mpi_flavor();
// Starts MPI in this process unless it has been started. All ranks of the job call it together; `world` is a request
// for a group of all of them. Throws std::runtime_error in a build without MPI, or when MPI does not start.
void start_mpi(const GroupRequest& world);
// Prevents the call of MPI_Finalize at exit(), which waits for all processes. It is called after a failure, when some
// of them will never call it.
void skip_mpi_end() noexcept;

}  // namespace tessera

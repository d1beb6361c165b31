#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
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

// A c10d backend and the way to end it at once.
struct BackendGroup {
  c10::intrusive_ptr<c10d::Backend> backend;
  // Makes the current collective of the other members, and every later one, fail now; over MPI only those of this rank:
  // the others learn of it by GroupRequest::lost. Not during one of this rank's own: it may then wait for its time
  // limit. Any thread, any number of times; never throws.
  std::function<void()> close;
  // Whether it may be closed during one too, which then ends.
  bool closes_while_busy = false;
};

struct GroupRequest {
  c10::intrusive_ptr<c10d::Store> store;  // of this group alone
  int rank = 0;                           // in the group
  int size = 1;
  std::vector<int64_t> ranks;  // of the job, in the order of the group
  c10::DeviceType device = c10::DeviceType::CPU;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  bool one_host = false;  // then nothing listens on an outside interface
  int device_index = 0;   // NCCL: this rank's CUDA device
  // Whether the job has failed, or the process of one of `awaited` (ranks of the job) has ended. For a backend whose
  // waits do not see that themselves: to be asked a few times a second of those it waits for. The others may have done
  // their part.
  std::function<bool(const std::vector<int64_t>& awaited)> lost = [](const std::vector<int64_t>&) { return false; };
};

// A wait that ended without what it was for.
struct WaitError : std::runtime_error {
  enum class Cause {
    kTimeout,
    kLeft,  // a rank that is a thread has ended its part of the job
    kLost,  // GroupRequest::lost said so
  };
  WaitError(Cause why, const std::string& text, std::vector<int64_t> for_ranks)
      : runtime_error(text), cause(why), awaited(std::move(for_ranks)) {}

  Cause cause;
  std::vector<int64_t> awaited;  // ranks of the job, whose messages had not come or been taken
};

// A World's own way to make groups. Collective over the group; throws what making it throws.
using MakeGroup = std::function<BackendGroup(const GroupRequest&)>;

// Collective over the group; each throws what the backend throws. Gloo's makes the process ignore SIGPIPE, unless it
// handles it: a lost peer is an error then, not its end.
BackendGroup make_gloo_group(const GroupRequest& request);
// Throws std::runtime_error in a build without NCCL, or without a GPU.
BackendGroup make_nccl_group(const GroupRequest& request);
// One that a caller made. Its close ends a Gloo group's connections, and calls abort() of any other.
BackendGroup wrap_group(c10::intrusive_ptr<c10d::Backend> backend);
// Over a communicator of the members; after start_mpi().
BackendGroup make_mpi_group(const GroupRequest& request);
// c10d's fake group: moves nothing.
BackendGroup make_fake_group(int rank, int size);

// The MPI that this build has: "Open MPI", "MPICH", "another MPI", or "" for none.
std::string_view mpi_flavor();
// Starts MPI in this process, unless it has been; `world` is a request of all ranks of the job, who come here together.
// Throws std::runtime_error in a build without MPI, or when MPI does not start.
void start_mpi(const GroupRequest& world);
// MPI that was started here is ended at exit(), where all processes meet. After a failure they do not: then this is
// called.
void skip_mpi_end() noexcept;

}  // namespace tessera

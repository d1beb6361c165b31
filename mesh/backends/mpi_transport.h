#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/backends/backend_group.h"

namespace tessera {

// Operations that have been started and not been waited for; empty at first.
struct MpiRequests;

// Bytes between the ranks of one group, over an MPI communicator of theirs alone: what the rest of this library sees of
// MPI.
//
// Everything is started at once and then polled, so that a wait can end by its time limit, by close(), or because the
// job has failed: a blocking MPI call could do none of that. Polling is as fast; see docs/backends.md.
class MpiTransport {
 public:
  // Collectives and messages of users have tags of their own.
  enum class Channel { kCollective, kMessage };

  // Collective over the group, after start_mpi(). Ranks that have not come are waited for in the request's store.
  // Throws std::runtime_error when MPI fails, or does not know the ranks as processes of one job.
  explicit MpiTransport(GroupRequest request);
  ~MpiTransport();
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  int rank() const { return request_.rank; }
  int size() const { return request_.size; }
  std::chrono::milliseconds timeout() const { return request_.timeout; }
  static int largest_tag();

  std::shared_ptr<MpiRequests> begin() const;
  // Each starts an operation on memory that must stay until `requests` are done. Any number of bytes; the other side
  // gives the same number. Throws std::runtime_error when MPI fails.
  void send(MpiRequests& requests, const char* data, int64_t bytes, int to, int tag, Channel channel);
  void receive(MpiRequests& requests, char* data, int64_t bytes, int from, int tag, Channel channel);

  // Whether all of `requests` are done; they are then empty again. Never waits. Throws std::runtime_error when one
  // failed.
  bool test(MpiRequests& requests);
  // Returns when test() is true. Throws std::runtime_error when MPI fails, the transport is closed, the job has failed
  // or the process of a member that is waited for has ended (GroupRequest::lost), or `timeout` after `start`; the
  // latter two are WaitErrors.
  void wait(MpiRequests& requests, std::chrono::milliseconds timeout, std::chrono::steady_clock::time_point start);

  // Makes this rank's current wait, and every later one, throw. Any thread, any number of times.
  void close() noexcept { closed_.store(true); }
  // For requests that will not be waited for: MPI cannot take back what was started, so their memory has to stay until
  // the process ends (and it ends as skip_mpi_end() says).
  static void abandon(std::shared_ptr<MpiRequests> requests, std::vector<at::Tensor> memory) noexcept;

 private:
  struct Communicators;
  void check_open() const;
  bool is_in_vain(MpiRequests& requests, std::vector<int64_t>& lost_before) const;
  [[noreturn]] void throw_wait_error(const MpiRequests& requests, WaitError::Cause cause,
                                     const std::string& what) const;

  const GroupRequest request_;
  std::unique_ptr<Communicators> communicators_;
  std::atomic<bool> closed_{false};
};

}  // namespace tessera

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

// Lists MPI operations that have been started and are not yet complete.
struct MpiRequests;

// Moves bytes between the ranks of one group, over MPI communicators of its own. Only its .cpp file calls MPI.
//
// Operations are started without blocking and then polled, so that a wait can end by its time limit, by close(), or
// because the job has failed: a blocking MPI call could not end so. Polling is as fast; see docs/backends.md.
class MpiTransport {
 public:
  // Collectives and users' messages have separate communicators, so their tags cannot collide.
  enum class Channel { kCollective, kMessage };

  // Collective over the group; call it after start_mpi(). It waits for the other ranks in the request's store. Throws
  // std::runtime_error when MPI fails, or when the ranks are not different processes of one MPI job.
  explicit MpiTransport(GroupRequest request);
  ~MpiTransport();
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  int rank() const { return request_.rank; }
  int size() const { return request_.size; }
  std::chrono::milliseconds timeout() const { return request_.timeout; }
  static int largest_tag();

  // Returns a new, empty list of operations. Throws std::runtime_error when the transport is closed.
  std::shared_ptr<MpiRequests> begin() const;
  // These start an operation on memory that must stay valid until `requests` are complete. Any number of bytes is
  // allowed; the other rank must give the same number. They throw std::runtime_error when MPI fails.
  void send(MpiRequests& requests, const char* data, int64_t bytes, int to, int tag, Channel channel);
  void receive(MpiRequests& requests, char* data, int64_t bytes, int from, int tag, Channel channel);

  // Returns whether all of `requests` are complete, and then empties them. Never waits. Throws std::runtime_error when
  // one has failed or the transport is closed.
  bool test(MpiRequests& requests);
  // Waits until test() is true. Throws std::runtime_error when MPI fails or the transport is closed, and WaitError when
  // GroupRequest::lost returns true for the ranks it waits for, when one of them has come to its end, or `timeout`
  // after `start`.
  void wait(MpiRequests& requests, std::chrono::milliseconds timeout, std::chrono::steady_clock::time_point start);

  // Makes this rank's current wait, and every later one, throw. Any thread may call it, any number of times.
  void close() noexcept { closed_.store(true); }
  // Keeps the memory of requests that nobody will wait for until the process ends, since MPI cannot cancel them. Like
  // skip_mpi_end(), it prevents MPI_Finalize.
  static void abandon(std::shared_ptr<MpiRequests> requests, std::vector<at::Tensor> memory) noexcept;

 private:
  struct Communicators;
  void check_open() const;
  std::vector<int64_t> left_of(const std::vector<int64_t>& awaited) const;
  bool is_in_vain(MpiRequests& requests, std::vector<int64_t>& lost_before) const;
  [[noreturn]] void throw_lost(const MpiRequests& requests) const;
  [[noreturn]] void throw_wait_error(const MpiRequests& requests, WaitError::Cause cause,
                                     const std::string& what) const;

  const GroupRequest request_;
  std::unique_ptr<Communicators> communicators_;
  std::atomic<bool> closed_{false};
};

}  // namespace tessera

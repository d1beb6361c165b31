#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/stream_point.h"

namespace tessera {

// Says when the caller waits for a collective that it starts: after other work, or at once, with the same current
// stream as at the start. A collective over NCCL runs on the group's own stream in the first case. In the second it
// runs on the current stream, which then need not wait for another one; on any other stream its values are not ready.
// Ranks need not agree on it.
enum class WaitTime { kLater, kAtOnce };

// Stands for a collective that this rank has started; wait() returns its result. Other collectives may be started
// before that, by every rank in the same order.
//
// It can be moved, not copied. If wait() has not been called, the destructor waits, and throws no error.
class PendingCollective {
 public:
  // Holds the call and the backend's works; see mesh/collectives/collective_frame.cpp.
  struct Work;

  // Makes one that sends nothing: its result has been queued where `queued` says.
  explicit PendingCollective(at::Tensor result, StreamPoint queued = {});
  explicit PendingCollective(std::unique_ptr<Work> work);
  PendingCollective(PendingCollective&&) noexcept;
  PendingCollective& operator=(PendingCollective&&) = delete;
  ~PendingCollective();

  // Waits and returns the result. Call it once. Throws std::runtime_error when the group fails or when another thread
  // of this rank is in a collective, and std::logic_error when it is called again.
  at::Tensor wait();

 private:
  at::Tensor result_;
  StreamPoint queued_;
  std::unique_ptr<Work> work_;
};

}  // namespace tessera

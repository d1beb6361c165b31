#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace tessera {

// A collective that this rank has started, and whose result wait() returns. Other collectives may be started meanwhile,
// by every rank in the same order.
//
// Moved, not copied. One that nobody waits for is waited for when it is destroyed, without an error.
class PendingCollective {
 public:
  // What a World and a backend know of it; see mesh/collectives/collective_frame.cpp.
  struct Work;

  // Nothing to wait for.
  explicit PendingCollective(at::Tensor result);
  explicit PendingCollective(std::unique_ptr<Work> work);
  PendingCollective(PendingCollective&&) noexcept;
  PendingCollective& operator=(PendingCollective&&) = delete;
  ~PendingCollective();

  // Once. Throws std::runtime_error when the group fails, as a collective does that waits at once, or when another
  // thread of this rank is in a collective; std::logic_error the second time.
  at::Tensor wait();

 private:
  at::Tensor result_;
  std::unique_ptr<Work> work_;
};

}  // namespace tessera

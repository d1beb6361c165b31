#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace tessera {

// A collective that this rank has begun: what it gives is on its way, and wait() returns what has come. Other collectives may be
// begun meanwhile, by every rank in the same order.
//
// Moved, not copied. One that nobody waits for is waited for when it is destroyed, without an error.
class Started {
 public:
  // What a World and a backend know of it; see mesh/collectives/collective_frame.cpp.
  struct Work;

  // Nothing to wait for.
  explicit Started(at::Tensor result);
  explicit Started(std::unique_ptr<Work> work);
  Started(Started&&) noexcept;
  Started& operator=(Started&&) = delete;
  ~Started();

  // Once. Throws std::runtime_error when the group fails, as a collective does that waits at once, or when another thread of this
  // rank is in a collective; std::logic_error the second time.
  at::Tensor wait();

 private:
  at::Tensor result_;
  std::unique_ptr<Work> work_;
};

}  // namespace tessera

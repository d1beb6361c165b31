#pragma once

#include <atomic>
#include <cstddef>

#include <ATen/core/Tensor.h>

namespace tessera {

// Holds the local tensors that an asynchronous redistribution will produce. A DTensor over one of them calls deliver()
// before it is read.
class PendingPieces {
 public:
  PendingPieces() = default;
  PendingPieces(const PendingPieces&) = delete;
  PendingPieces& operator=(const PendingPieces&) = delete;
  virtual ~PendingPieces() = default;

  // Waits for piece i, and stores it in `piece` if it is still `awaited`. Every rank must wait for the pieces in the
  // same order. Any thread that may communicate can call it.
  virtual void deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& awaited) = 0;
};

}  // namespace tessera

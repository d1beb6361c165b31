#pragma once

#include <atomic>
#include <cstddef>

#include <ATen/core/Tensor.h>

namespace tessera {

// Pieces of DTensors that an asynchronous redistribution has begun to move: what a DTensor must know of it before it
// can be read.
class PendingPieces {
 public:
  PendingPieces() = default;
  PendingPieces(const PendingPieces&) = delete;
  PendingPieces& operator=(const PendingPieces&) = delete;
  virtual ~PendingPieces() = default;

  // Waits for piece i and puts it into `piece`, if it is still `awaited`. Every rank waits for the pieces in the same
  // order; from any thread that may communicate.
  virtual void deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& awaited) = 0;
};

}  // namespace tessera

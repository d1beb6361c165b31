#pragma once

#include <atomic>
#include <cstddef>

#include <ATen/core/Tensor.h>

namespace tessera {

// Holds the local tensors that an asynchronous redistribution will produce. A DTensor over one of them calls deliver()
// before it is read.
class AsyncPieces {
 public:
  AsyncPieces() = default;
  AsyncPieces(const AsyncPieces&) = delete;
  AsyncPieces& operator=(const AsyncPieces&) = delete;
  virtual ~AsyncPieces() = default;

  // Waits for piece i, and stores it in `piece` if it is still `undelivered`. Every rank must wait for the pieces in
  // the same order. Any thread that may communicate can call it.
  virtual void deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& undelivered) = 0;
};

}  // namespace tessera

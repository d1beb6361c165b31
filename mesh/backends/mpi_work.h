#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/mesh/backends/mpi_transport.h"

namespace tessera {

// One step of an operation: starts messages, or computes.
using MpiStage = std::function<void(MpiRequests&)>;

// An operation over MPI, made of stages; the next one starts when the messages of the one before have come. Messages
// travel while somebody waits or asks, and later stages run then, on that thread: there is no other. One that nobody
// waits for is waited for when it is destroyed.
//
// What its stages use stays until it is done. After an exception it stays until the process ends
// (MpiTransport::abandon).
class MpiWork : public c10d::Work {
 public:
  // Starts the first stage. `source` is the rank from which a message comes, or -1. Throws what the stage throws.
  MpiWork(std::shared_ptr<MpiTransport> transport, std::chrono::milliseconds timeout, std::vector<MpiStage> stages,
          std::vector<at::Tensor> memory, int source = -1);
  ~MpiWork() override;

  bool isCompleted() override;
  bool isSuccess() const override { return done_; }
  int sourceRank() const override { return source_; }
  void synchronize() override { wait(kNoTimeout); }
  // kNoTimeout means the operation's own. Throws as MpiTransport::wait does, and the same again later.
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  template <typename Body>
  void guarded(const Body& body);
  void start_stage();
  void next_stage();

  const std::shared_ptr<MpiTransport> transport_;
  const std::chrono::milliseconds timeout_;
  const std::vector<MpiStage> stages_;
  std::vector<at::Tensor> memory_;
  std::shared_ptr<MpiRequests> requests_;
  const int source_;
  std::size_t stage_ = 0;
  bool done_;
};

}  // namespace tessera

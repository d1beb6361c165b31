#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/mesh/backends/mpi_transport.h"

namespace tessera {

// A stage is one step of an operation: it starts messages, or computes.
using MpiStage = std::function<void(MpiRequests&)>;

// Runs an operation over MPI in stages. A stage starts when the messages of the one before are complete. There is no
// thread in the background: later stages run on the thread that calls wait() or isCompleted(). The destructor waits for
// an operation that nobody has waited for.
//
// Invariants:
//   - The memory that its stages use stays valid until it is done; after an exception, until the process ends
//     (MpiTransport::abandon).
class MpiWork : public c10d::Work {
 public:
  // Starts the first stage. `memory` lists the tensors that the stages use. `source` is the rank that sends the
  // message, or -1. Throws what the stage throws.
  MpiWork(std::shared_ptr<MpiTransport> transport, std::chrono::milliseconds timeout, std::vector<MpiStage> stages,
          std::vector<at::Tensor> memory, int source = -1);
  ~MpiWork() override;

  bool isCompleted() override;
  bool isSuccess() const override { return done_; }
  int sourceRank() const override { return source_; }
  void synchronize() override { wait(kNoTimeout); }
  // kNoTimeout means the operation's own timeout. Throws like MpiTransport::wait; later calls throw the same again.
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

#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "tessera/dtensor/core/pending_pieces.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/transfer_batch.h"

namespace tessera {

// Several redistributions on one mesh, executed together. In every round the next transfers of all of them are started
// at once, those that fit together as one collective; then the round is waited for.
class PendingRedistributions final : public PendingPieces {
 public:
  struct Item {
    RoutePtr route;
    at::Tensor piece;
  };
  // Begins the first round. Every rank of the mesh does, with the same routes in the same order.
  PendingRedistributions(const DeviceMesh& mesh, std::vector<Item> items);

  // Puts item i's piece at the end of its route into `piece`, if it is still `awaited`: row-major, sharing no storage
  // with the piece that was given. The first call carries out what is left, on every rank alike; from any thread that
  // may communicate, on CUDA in the stream in which the redistributions began. Throws as redistribute does, and the
  // same again later.
  void deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& awaited) override;

  // From now on `tensor` is not to be written until the pieces have come: deliver() throws std::runtime_error where it
  // was.
  void watch(const at::Tensor& tensor);

 private:
  struct Progress {
    RoutePtr route;
    at::Tensor piece;
    std::size_t step = 0;  // of the route: the next one
  };
  struct WatchedVersion {
    c10::VariableVersion version;
    uint32_t seen;
    std::string text;
  };
  void begin_round();
  void end_round();
  void finish();
  void check_unwritten() const;

  const DeviceMesh mesh_;
  const std::string op_;  // for which the collectives are counted
  const std::string path_;
  const bool inference_;
  std::vector<Progress> progress_;
  std::vector<at::Tensor> given_;
  std::vector<WatchedVersion> watched_;
  std::vector<TransferBatch> batches_;                 // of this round
  std::vector<std::vector<std::size_t>> batch_items_;  // for each batch, the items that it moves

  std::mutex mutex_;
  bool finished_ = false;
  std::exception_ptr error_;
};

}  // namespace tessera

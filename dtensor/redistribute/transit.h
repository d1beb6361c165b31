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
#include "tessera/dtensor/redistribute/shipment.h"

namespace tessera {

// Pieces on their way, each along its route, all over one mesh. In every round the next transfers of all of them are begun at
// once, those that can go together as one collective; then the round is waited for.
class Transit final : public PendingPieces {
 public:
  struct Item {
    RoutePtr route;
    at::Tensor piece;
  };
  // Begins the first round. Every rank of the mesh does, with the same routes in the same order.
  Transit(const DeviceMesh& mesh, std::vector<Item> items);

  // Puts item i's piece at the end of its route into `piece`, if it is still `awaited`: row-major, sharing no storage with the piece
  // that was given. The first call carries out what is left, on every rank alike; from any thread that may communicate, on CUDA in the
  // stream in which the transit began. Throws as redistribute does, and the same again later.
  void deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& awaited) override;

  // From now on `tensor` is not to be written until the pieces have come: deliver() throws std::runtime_error where it was.
  void watch(const at::Tensor& tensor);

 private:
  struct Traveller {
    RoutePtr route;
    at::Tensor piece;
    std::size_t step = 0;  // that is next
  };
  struct Written {
    c10::VariableVersion version;
    uint32_t seen;
    std::string text;
  };
  void begin_round();
  void end_round();
  void finish();
  void check_unwritten() const;

  const DeviceMesh mesh_;
  const std::string op_;  // that is charged
  const std::string path_;
  const bool inference_;
  std::vector<Traveller> travellers_;
  std::vector<at::Tensor> given_;
  std::vector<Written> watched_;
  std::vector<Shipment> shipments_;               // of this round
  std::vector<std::vector<std::size_t>> aboard_;  // which travellers are in each

  std::mutex mutex_;
  bool finished_ = false;
  std::exception_ptr error_;
};

}  // namespace tessera

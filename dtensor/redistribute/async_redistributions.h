#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "tessera/dtensor/core/async_pieces.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/collectives/pending_collective.h"
#include "tessera/mesh/core/stream_point.h"

namespace tessera {

// Executes several redistributions on one mesh together, and waits for them when the first result is read.
//
// Invariants:
//   - finish() runs at most once, under mutex_; if it throws, every later deliver() throws the same exception (error_).
class AsyncRedistributions final : public AsyncPieces {
 public:
  struct Item {
    RoutePtr route;
    at::Tensor piece;
    bool owned = false;      // see RouteExecution::Item
    bool may_share = false;  // see RouteExecution::Item
  };
  // Starts the first round. Every rank of the mesh calls it with the same routes in the same order. With
  // WaitTime::kAtOnce the caller reads a result next (mesh/collectives/pending_collective.h).
  AsyncRedistributions(const DeviceMesh& mesh, std::vector<Item> items, WaitTime wait_time = WaitTime::kLater);

  // Stores item i's redistributed piece in `piece`, if it is still `undelivered`; it is row-major and shares no storage
  // with the piece that was given. The first call finishes all redistributions, so every rank must make it. Any thread
  // that may communicate can call it, on any stream: the current one waits for the result. Throws as redistribute does,
  // and the same exception again on later calls.
  void deliver(std::size_t i, at::Tensor& piece, std::atomic<bool>& undelivered) override;

  // Makes deliver() throw std::runtime_error, on a rank that writes a DTensor between this call and the end of the
  // redistributions. Other ranks get either value.
  void forbid_writes(const at::Tensor& dtensor);

 private:
  struct UnwrittenTensor {
    detail::WriteCounters counters;
    uint32_t writes;  // the sum of `counters` at the start
    std::string text;
  };
  void finish();
  void check_unwritten() const;

  const DeviceMesh mesh_;
  const std::string op_;  // the operator that the collectives are counted under
  const std::string path_;
  const bool inference_;
  const std::vector<RoutePtr> routes_;
  std::optional<RouteExecution> execution_;  // empty once it is finished
  std::vector<at::Tensor> pieces_;           // the results, once it is finished
  StreamPoint queued_;                       // what has been queued: the start, then the end
  std::vector<UnwrittenTensor> unwritten_;

  std::mutex mutex_;
  bool finished_ = false;
  std::exception_ptr error_;
};

}  // namespace tessera

#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/transfer_batch.h"

namespace tessera {

// Executes the routes of one or several redistributions on one mesh, each on its piece. In every round the next
// transfers of all of them are started, those that fit together as one collective; then the round is waited for. The
// caller turns autograd off. It owns neither the mesh nor the routes.
class RouteExecution {
 public:
  struct Item {
    const Route* route;
    at::Tensor piece;    // of any strides
    bool owned = false;  // nobody reads the piece later, so it may be reduced in place; otherwise it is never written
    // The result may lie in memory that other results of the same collective share. The caller frees all of them at
    // about the same time, since each keeps the memory of all.
    bool may_share = false;
  };
  using Items = c10::SmallVector<Item, 1>;
  // Starts the first round. Every rank of the mesh calls it with the same routes in the same order.
  RouteExecution(const DeviceMesh& mesh, Items items, WaitTime wait_time);

  // Waits for the round, and starts and waits for all that follow.
  void finish();
  // Returns item i's piece at the end of its route. Call it after finish(). The piece may share storage with given(i),
  // which is undefined if it was freed when it had been packed.
  at::Tensor& piece(std::size_t i) { return progress_[i].piece; }
  const at::Tensor& given(std::size_t i) const { return progress_[i].given; }
  bool owned(std::size_t i) const { return progress_[i].owned; }

 private:
  struct Progress {
    const Route* route;
    at::Tensor given;
    at::Tensor piece;
    bool owned;
    bool may_share;
    std::size_t step = 0;  // the index of the route's next step
  };
  struct Batch {
    TransferBatch transfers;
    c10::SmallVector<std::size_t, 1> items;  // the indexes of its items, in the order of its entries
  };
  void begin_round(WaitTime wait_time);
  void end_round();

  const DeviceMesh* mesh_;
  c10::SmallVector<Progress, 1> progress_;
  c10::SmallVector<Batch, 1> batches_;  // of this round
};

// Executes `route` on this rank's piece, on the mesh that it was made for; every rank of the mesh must call this. The
// result may share storage with `local`, which is written only with `owned`. Autograd records nothing. On a rank
// outside the mesh, returns an empty tensor without communication.
at::Tensor run_route(const Route& route, const DeviceMesh& mesh, const at::Tensor& local, bool owned = false);

// Runs the route from `from` to `to`.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to);

}  // namespace tessera

#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/transfer.h"

namespace tessera {

// Transfers that go in one collective: one message from each rank to each. Those that move elements travel as bytes, so that dtypes
// mix; those that reduce, in their dtype.
class Shipment {
 public:
  struct Load {
    const Transfer* transfer;
    at::Tensor tensor;  // what Transfer::loaded gave
    bool owned;         // nobody else reads it
  };
  // Whether `b` may go with `a`.
  static bool together(const Load& a, const Load& b);

  // Packs and begins.
  Shipment(const DeviceMesh& mesh, std::vector<Load> loads);
  // Waits and unpacks: the pieces, in the order of the loads. Once.
  std::vector<at::Tensor> arrive();

 private:
  // Where a region of a load stands among what travels: elements of the wire.
  struct Slot {
    std::size_t load;
    const Region* region;
    int64_t offset;
  };
  using Regions = const std::vector<Region>& (Transfer::*)() const;
  std::vector<Slot> slots_of(Regions regions, std::vector<int64_t>& counts) const;
  at::Tensor part(const at::Tensor& wire, const Slot& slot) const;
  Started start_together(const DeviceMesh& mesh);
  std::vector<at::Tensor> unpack_together(const at::Tensor& wire) const;

  std::vector<Load> loads_;
  std::vector<at::TensorOptions> options_;  // of each load
  std::vector<Slot> takes_;
  std::unique_ptr<Started> started_;
};

}  // namespace tessera

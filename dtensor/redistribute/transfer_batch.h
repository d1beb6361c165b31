#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/transfer.h"

namespace tessera {

// Runs several transfers as one collective, with one message per pair of ranks. Those that move elements are sent as
// bytes, so that dtypes can be mixed; those that reduce are sent in their dtype.
class TransferBatch {
 public:
  struct Entry {
    const Transfer* transfer;
    at::Tensor tensor;  // the result of Transfer::input_of
    bool owned;         // nobody else reads it later
  };
  // Says whether `a` and `b` can share a collective.
  static bool together(const Entry& a, const Entry& b);

  // Packs the regions and starts the collective.
  TransferBatch(const DeviceMesh& mesh, std::vector<Entry> entries);
  // Waits, unpacks, and returns the pieces in the order of the entries. Call it once.
  std::vector<at::Tensor> wait();

 private:
  // Gives the offset of an entry's region in the tensor that is sent or received, in elements of that tensor.
  struct Slot {
    std::size_t entry;
    const Region* region;
    int64_t offset;
  };
  using Regions = const std::vector<Region>& (Transfer::*)() const;
  std::vector<Slot> slots_of(Regions regions, std::vector<int64_t>& counts) const;
  at::Tensor part(const at::Tensor& wire, const Slot& slot) const;
  PendingCollective start_together(const DeviceMesh& mesh);
  std::vector<at::Tensor> unpack_together(const at::Tensor& wire) const;

  std::vector<Entry> entries_;
  std::vector<at::TensorOptions> options_;  // of each entry
  std::vector<Slot> takes_;
  std::unique_ptr<PendingCollective> pending_;
};

}  // namespace tessera

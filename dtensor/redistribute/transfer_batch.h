#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/redistribute/transfer.h"

namespace tessera {

// Runs one transfer, or several as one collective, with one message per pair of ranks. Several that move elements are
// sent as bytes, so that dtypes can be mixed; those that reduce are sent in their dtype. One transfer alone is sent
// without a copy where its regions lie one after the other in memory.
class TransferBatch {
 public:
  struct Entry {
    const Transfer* transfer;
    at::Tensor tensor;       // the result of Transfer::input_of
    bool owned;              // nobody else reads it later, so it may be reduced in place
    bool may_share = false;  // see RouteExecution::Item
  };
  using Entries = c10::SmallVector<Entry, 1>;
  // Says whether `a` and `b` can share a collective.
  static bool can_share(const Entry& a, const Entry& b);

  // Packs, and starts the collective over the entries' dimensions of `mesh`.
  TransferBatch(const DeviceMesh& mesh, Entries entries, WaitTime wait_time);
  // Waits, unpacks, and returns the pieces in the order of the entries. Call it once.
  c10::SmallVector<at::Tensor, 1> wait();

 private:
  // Holds the tensor that one collective sends, and the elements for each receiver and from each sender.
  struct Message {
    at::Tensor data;
    std::vector<int64_t> send_counts;
    std::vector<int64_t> receive_counts;
  };
  // Gives the offset of an entry's region in the tensor that is sent or received, in elements of that tensor.
  struct Slot {
    std::size_t entry;
    const Region* region;
    int64_t offset;
  };
  using Regions = const std::vector<Region>& (Transfer::*)() const;
  std::vector<Slot> slots_of(Regions regions, std::vector<int64_t>& counts) const;
  at::Tensor part(const at::Tensor& data, const Slot& slot) const;
  // Says whether the entry's result is left where it was received.
  bool stays(std::size_t entry) const {
    return entries_[entry].may_share && entries_[entry].transfer->receives_result();
  }
  Message joined_message();
  // Returns the entries' tensors as the one tensor that they are parts of, if each lies in its slot of that already and
  // nobody else reads them.
  std::optional<at::Tensor> in_place(const std::vector<Slot>& sends, int64_t size) const;
  PendingCollective start(const DeviceMesh& mesh, WaitTime wait_time);
  c10::SmallVector<at::Tensor, 1> unpacked(const at::Tensor& received) const;

  const std::shared_ptr<World> world_;
  Entries entries_;
  std::vector<at::TensorOptions> options_;  // [entry]; empty for one entry alone
  std::vector<Slot> receives_;              // where the received regions are; empty for one entry alone
  std::optional<PendingCollective> pending_;
};

}  // namespace tessera

#include "tessera/dtensor/redistribute/transfer_batch.h"

#include <numeric>
#include <stdexcept>
#include <utility>

#include <ATen/ceil_div.h>

#include "tessera/mesh/core/reused_memory.h"
#include "tessera/mesh/failing.h"

namespace tessera {
namespace {

using Kind = PlanStep::Kind;

// A permutation in a batch runs as an all-to-all.
Kind collective_of(const Transfer& transfer) {
  return transfer.kind() == Kind::kPermute ? Kind::kAllToAll : transfer.kind();
}

// Is a number of bytes: a tensor of any dtype may start at a multiple of it.
constexpr int64_t kAlignment = 16;

constexpr const char* kPacking = "packing what a collective sends";

// Starts the collective of a redistribution's step; no other function does. `transfer` says by which operation it
// reduces; with `owned`, it may reduce `data` in place.
PendingCollective start_collective(Kind kind, const at::Tensor& data, const std::vector<int64_t>& send_counts,
                                   const std::vector<int64_t>& receive_counts, const DeviceMesh& over,
                                   const Transfer& transfer, bool owned, WaitTime wait_time) {
  switch (kind) {
    case Kind::kAllGather: return start_all_gather(data, receive_counts, over, 0, wait_time);
    case Kind::kAllToAll: return start_all_to_all(data, send_counts, receive_counts, over, 0, wait_time);
    case Kind::kPermute: return start_permute(data, send_counts, receive_counts, over, 0, wait_time);
    case Kind::kAllReduce: return start_all_reduce(data, over, 0, transfer.op(), owned, wait_time);
    case Kind::kReduceScatter: return start_reduce_scatter(data, send_counts, over, 0, transfer.op(), wait_time);
    case Kind::kLocal: break;
  }
  throw std::logic_error("a local step has no collective");
}

}  // namespace

bool TransferBatch::can_share(const Entry& a, const Entry& b) {
  if (collective_of(*a.transfer) != collective_of(*b.transfer) || a.transfer->mesh_dims() != b.transfer->mesh_dims()) {
    return false;
  }
  return !a.transfer->reduces() ||
         (a.transfer->op() == b.transfer->op() && a.tensor.scalar_type() == b.tensor.scalar_type());
}

TransferBatch::TransferBatch(const DeviceMesh& mesh, Entries entries, WaitTime wait_time)
    : world_(mesh.world_ptr()), entries_(std::move(entries)) {
  pending_.emplace(start(mesh, wait_time));
  for (Entry& entry : entries_) {
    if (!entry.transfer->keeps_input()) entry.tensor.reset();
  }
}

PendingCollective TransferBatch::start(const DeviceMesh& mesh, WaitTime wait_time) {
  const Entry& first = entries_[0];
  const Transfer& transfer = *first.transfer;
  const DeviceMesh over = mesh.merged(transfer.mesh_dims());
  if (entries_.size() == 1) {
    const at::Tensor packed = failing(*world_, kPacking, [&] { return transfer.packed(first.tensor); });
    return start_collective(transfer.kind(), packed, transfer.send_counts(), transfer.receive_counts(), over, transfer,
                            first.owned || transfer.packs(), wait_time);
  }
  const Message message = failing(*world_, kPacking, [&] { return joined_message(); });
  return start_collective(collective_of(transfer), message.data, message.send_counts, message.receive_counts, over,
                          transfer, true, wait_time);
}

c10::SmallVector<at::Tensor, 1> TransferBatch::wait() {
  at::Tensor received = pending_->wait();
  return failing(*world_, "unpacking what a collective has received", [&] {
    if (entries_.size() > 1) return unpacked(received);
    return c10::SmallVector<at::Tensor, 1>{entries_[0].transfer->unpacked(std::move(received), entries_[0].tensor)};
  });
}

// Returns the slots, which follow one another per rank (or once, where all ranks get the same); `counts` gets the
// number of elements per rank.
std::vector<TransferBatch::Slot> TransferBatch::slots_of(Regions regions, std::vector<int64_t>& counts) const {
  const bool bytes = !entries_[0].transfer->reduces();
  std::vector<Slot> slots;
  int64_t offset = 0;
  for (std::size_t rank = 0; rank < (entries_[0].transfer->*regions)().size(); ++rank) {
    const int64_t begin = offset;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Region& region = (entries_[i].transfer->*regions)()[rank];
      slots.push_back({.entry = i, .region = &region, .offset = offset});
      const auto size = static_cast<int64_t>(options_[i].dtype().itemsize());
      offset += bytes ? at::ceil_div(region.numel() * size, kAlignment) * kAlignment : region.numel();
    }
    counts.push_back(offset - begin);
  }
  return slots;
}

at::Tensor TransferBatch::part(const at::Tensor& data, const Slot& slot) const {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options_[slot.entry].dtype());
  if (data.scalar_type() == dtype) return data.narrow(0, slot.offset, slot.region->numel());
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return data.narrow(0, slot.offset, slot.region->numel() * size).view(dtype);
}

TransferBatch::Message TransferBatch::joined_message() {
  for (const Entry& entry : entries_) options_.push_back(entry.tensor.options());
  Message message;
  const std::vector<Slot> sends = slots_of(&Transfer::sends, message.send_counts);
  receives_ = slots_of(&Transfer::receives, message.receive_counts);
  const bool reduces = entries_[0].transfer->reduces();
  const int64_t size = std::accumulate(message.send_counts.begin(), message.send_counts.end(), int64_t{0});
  if (const std::optional<at::Tensor> there = in_place(sends, size)) {
    message.data = *there;
    return message;
  }
  message.data = reused_empty({size}, reduces ? options_[0] : options_[0].dtype(at::kByte));
  Copies copies;
  for (const Slot& slot : sends) {
    if (slot.region->numel() > 0) slot.region->pack(entries_[slot.entry].tensor, part(message.data, slot), 0, copies);
  }
  copies.run();
  return message;
}

std::optional<at::Tensor> TransferBatch::in_place(const std::vector<Slot>& sends, int64_t size) const {
  const at::Tensor& first = entries_[0].tensor;
  if (!entries_[0].transfer->reduces() || sends.size() != entries_.size()) return std::nullopt;
  for (const Slot& slot : sends) {
    const Entry& entry = entries_[slot.entry];
    const at::Tensor& tensor = entry.tensor;
    if (!entry.owned || !tensor.has_storage() || !tensor.is_contiguous() || !tensor.is_alias_of(first) ||
        tensor.storage_offset() != first.storage_offset() + slot.offset || slot.region->numel() != tensor.numel() ||
        slot.region->flat_offset() != 0) {
      return std::nullopt;
    }
  }
  return first.as_strided({size}, {1}, first.storage_offset());
}

c10::SmallVector<at::Tensor, 1> TransferBatch::unpacked(const at::Tensor& received) const {
  c10::SmallVector<at::Tensor, 1> out;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    out.push_back(stays(i) ? at::Tensor() : entries_[i].transfer->empty_result(options_[i]));
  }
  Copies copies;
  for (const Slot& slot : receives_) {
    if (stays(slot.entry)) {
      out[slot.entry] = part(received, slot).view(slot.region->sizes());
    } else if (slot.region->numel() > 0) {
      slot.region->unpack(part(received, slot), 0, out[slot.entry], copies);
    }
  }
  copies.run();
  for (std::size_t i = 0; i < entries_.size(); ++i)
    out[i] = entries_[i].transfer->completed(out[i], entries_[i].tensor);
  return out;
}

}  // namespace tessera

#include "tessera/dtensor/redistribute/transfer_batch.h"

#include <numeric>
#include <utility>

#include <ATen/ceil_div.h>

#include "tessera/mesh/core/reused_memory.h"

namespace tessera {
namespace {

using Kind = PlanStep::Kind;

// A permutation in a batch runs as an all-to-all.
Kind collective_of(const Transfer& transfer) {
  return transfer.kind() == Kind::kPermute ? Kind::kAllToAll : transfer.kind();
}

// Is in bytes: a tensor of any dtype may start at a multiple of it.
constexpr int64_t kAlignment = 16;

}  // namespace

bool TransferBatch::together(const Entry& a, const Entry& b) {
  if (collective_of(*a.transfer) != collective_of(*b.transfer) || a.transfer->mesh_dims() != b.transfer->mesh_dims()) {
    return false;
  }
  return !a.transfer->reduces() ||
         (a.transfer->op() == b.transfer->op() && a.tensor.scalar_type() == b.tensor.scalar_type());
}

TransferBatch::TransferBatch(const DeviceMesh& mesh, std::vector<Entry> entries) : entries_(std::move(entries)) {
  for (const Entry& entry : entries_) options_.push_back(entry.tensor.options());
  if (entries_.size() > 1) {
    pending_ = std::make_unique<PendingCollective>(start_together(mesh));
  } else {
    const Entry& only = entries_[0];
    pending_ = std::make_unique<PendingCollective>(only.transfer->start(mesh, only.tensor, only.owned));
  }
  for (Entry& entry : entries_) {
    if (!entry.transfer->keeps_input()) entry.tensor.reset();
  }
}

std::vector<at::Tensor> TransferBatch::wait() {
  at::Tensor received = pending_->wait();
  if (entries_.size() > 1) return unpack_together(received);
  return {entries_[0].transfer->result(std::move(received), entries_[0].tensor)};
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

at::Tensor TransferBatch::part(const at::Tensor& wire, const Slot& slot) const {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options_[slot.entry].dtype());
  if (wire.scalar_type() == dtype) return wire.narrow(0, slot.offset, slot.region->numel());
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return wire.narrow(0, slot.offset, slot.region->numel() * size).view(dtype);
}

PendingCollective TransferBatch::start_together(const DeviceMesh& mesh) {
  const Transfer& first = *entries_[0].transfer;
  std::vector<int64_t> give;
  std::vector<int64_t> take;
  const std::vector<Slot> gives = slots_of(&Transfer::gives, give);
  takes_ = slots_of(&Transfer::takes, take);
  const at::TensorOptions options = first.reduces() ? options_[0] : options_[0].dtype(at::kByte);
  const at::Tensor wire = reused_empty({std::accumulate(give.begin(), give.end(), int64_t{0})}, options);
  for (const Slot& slot : gives) {
    if (slot.region->numel() > 0) slot.region->pack(entries_[slot.entry].tensor, part(wire, slot), 0);
  }
  const DeviceMesh over = mesh.merged(first.mesh_dims());
  switch (collective_of(first)) {
    case Kind::kAllGather: return start_all_gather(wire, take, over, 0);
    case Kind::kAllReduce: return start_all_reduce(wire, over, 0, first.op(), /*owned=*/true);
    case Kind::kReduceScatter: return start_reduce_scatter(wire, give, over, 0, first.op());
    default: return start_all_to_all(wire, give, take, over, 0);
  }
}

std::vector<at::Tensor> TransferBatch::unpack_together(const at::Tensor& wire) const {
  std::vector<at::Tensor> out;
  for (std::size_t i = 0; i < entries_.size(); ++i) out.push_back(entries_[i].transfer->empty_result(options_[i]));
  for (const Slot& slot : takes_) {
    if (slot.region->numel() > 0) slot.region->unpack(part(wire, slot), 0, out[slot.entry]);
  }
  for (std::size_t i = 0; i < entries_.size(); ++i)
    out[i] = entries_[i].transfer->completed(out[i], entries_[i].tensor);
  return out;
}

}  // namespace tessera

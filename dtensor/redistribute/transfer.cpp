#include "tessera/dtensor/redistribute/transfer.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <c10/util/accumulate.h>

#include "tessera/mesh/core/reused_memory.h"
#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;

Counts counts_of(const std::vector<Region>& regions) {
  Counts out;
  for (const Region& region : regions) out.push_back(region.numel());
  return out;
}

// Says whether the regions are adjacent from the tensor's first element on, so that the tensor itself equals them
// packed.
bool in_sequence(const std::vector<Region>& regions) {
  int64_t next = 0;
  for (const Region& region : regions) {
    if (region.numel() > 0 && region.flat_offset() != next) return false;
    next += region.numel();
  }
  return true;
}

Region whole(const Tile& tile) { return Region::within(tile, tile); }

int64_t sum_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// Packs the regions one after the other.
at::Tensor pack_all(const std::vector<Region>& regions, const at::Tensor& tensor) {
  at::Tensor out = reused_empty({sum_of(counts_of(regions))}, tensor.options());
  Copies copies;
  int64_t offset = 0;
  for (const Region& region : regions) {
    region.pack(tensor, out, offset, copies);
    offset += region.numel();
  }
  copies.run();
  return out;
}

}  // namespace

Transfer::Transfer(const StepOnRank& at)
    : kind_(at.step.kind), mesh_dims_(at.step.mesh_dims), sizes_(shape_of(at.target())) {
  switch (kind_) {
    case PlanStep::Kind::kAllGather: prepare_all_gather(at); break;
    case PlanStep::Kind::kAllToAll:
    case PlanStep::Kind::kPermute:
      prepare_exchange(exchange_of(at.shape, at.step.from, at.step.to, at.mesh_shape, at.group, at.coordinate),
                       static_cast<std::size_t>(at.group.index_of(at.coordinate)));
      break;
    case PlanStep::Kind::kAllReduce: prepare_all_reduce(at); break;
    case PlanStep::Kind::kReduceScatter: prepare_reduce_scatter(at); break;
    case PlanStep::Kind::kLocal: throw std::logic_error("Transfer: a local step moves nothing");
  }
  count();
}

Transfer::Transfer(const Exchange& exchange, std::size_t me)
    : kind_(PlanStep::Kind::kAllToAll), mesh_dims_({0}), sizes_(shape_of(exchange.target)) {
  prepare_exchange(exchange, me);
  count();
}

void Transfer::count() {
  send_counts_ = counts_of(sends_);
  receive_counts_ = counts_of(receives_);
  send_sum_ = sum_of(send_counts_);
  sends_in_sequence_ = in_sequence(sends_);
  receives_in_sequence_ = !copied_locally_ && in_sequence(receives_);
}

void Transfer::prepare_all_gather(const StepOnRank& at) {
  const Tile target = at.target();
  sends_.push_back(whole(at.source()));
  for (int64_t i = 0; i < at.group.size(); ++i) receives_.push_back(Region::within(target, at.source_of(i)));
}

// A part that this rank keeps goes through the collective if the regions sent, or those received, are then adjacent in
// memory and need no packing; else it is copied locally.
void Transfer::prepare_exchange(const Exchange& exchange, std::size_t me) {
  for (std::size_t i = 0; i < exchange.sends.size(); ++i) {
    sends_.push_back(Region::within(exchange.source, i == me ? exchange.receives[i] : exchange.sends[i]));
    receives_.push_back(Region::within(exchange.target, exchange.receives[i]));
  }
  if (in_sequence(sends_) || in_sequence(receives_)) return;
  copied_locally_ = std::pair(sends_[me], receives_[me]);
  sends_[me] = receives_[me] = Region(Tile(sizes_.size()), Counts(sizes_.size(), 0));
}

void Transfer::prepare_all_reduce(const StepOnRank& at) {
  add_reductions(at);
  const Tile source = at.source();
  const GroupTiles all = group_tiles_of(at.shape, at.step.to, at.mesh_shape, at.group, at.coordinate);
  if (all.tiles.size() == 1) {
    if (shape_of(source) != sizes_) needed_.push_back(Region::within(source, all.tiles[0]));
  } else {
    for (const Tile& tile : all.tiles) needed_.push_back(Region::within(source, tile));
    const Counts counts = counts_of(needed_);
    const auto own = counts.begin() + static_cast<std::ptrdiff_t>(all.own);
    part_of_all_reduce_ = {std::accumulate(counts.begin(), own, int64_t{0}), std::move(sizes_)};
    sizes_ = {sum_of(counts)};
  }
  Tile comes;
  for (const int64_t size : sizes_) comes.push_back(one_interval(0, size));
  sends_.push_back(whole(comes));
  receives_.push_back(whole(comes));
}

void Transfer::prepare_reduce_scatter(const StepOnRank& at) {
  add_reductions(at);
  const Tile source = at.source();
  for (int64_t i = 0; i < at.group.size(); ++i) sends_.push_back(Region::within(source, at.target_of(i)));
  receives_.push_back(whole(at.target()));
}

void Transfer::add_reductions(const StepOnRank& at) {
  for (const int64_t mesh_dim : mesh_dims_) {
    const auto i = static_cast<std::size_t>(mesh_dim);
    const ReductionPtr reduction = at.step.from[i].reduction_ptr();
    const auto found = std::ranges::find_if(reductions_, [&](const auto& one) { return *one.first == *reduction; });
    if (found == reductions_.end()) {
      reductions_.emplace_back(reduction, at.mesh_shape[i]);
    } else {
      found->second *= at.mesh_shape[i];
    }
  }
  dtype_ = at.dtype;
}

at::Tensor Transfer::input_of(const at::Tensor& piece) const {
  at::Tensor out = piece;
  if (part_of_all_reduce_) {
    out = pack_all(needed_, row_major(piece));
  } else if (!needed_.empty()) {
    out = needed_[0].read(row_major(piece));
  }
  for (const auto& [reduction, ranks] : reductions_) out = term_of(*reduction, out);
  return row_major(out);
}

at::Tensor Transfer::packed(const at::Tensor& input) const {
  return sends_in_sequence_ ? as_sizes(input, send_sum_) : pack_all(sends_, input);
}

at::Tensor Transfer::unpacked(at::Tensor received, const at::Tensor& input) const {
  if (receives_in_sequence_) return completed(as_sizes(std::move(received), sizes_), input);
  at::Tensor out = empty_result(received.options());
  Copies copies;
  int64_t offset = 0;
  for (const Region& region : receives_) {
    region.unpack(received, offset, out, copies);
    offset += region.numel();
  }
  copies.run();
  return completed(std::move(out), input);
}

at::Tensor Transfer::empty_result(const at::TensorOptions& options) const { return reused_empty(sizes_, options); }

at::Tensor Transfer::completed(at::Tensor value, const at::Tensor& input) const {
  if (copied_locally_) copied_locally_->first.copy(input, copied_locally_->second, value);
  if (part_of_all_reduce_) {  // a copy, so that the other ranks' parts are freed
    value = reused_copy(value.narrow(0, part_of_all_reduce_->first, c10::multiply_integers(part_of_all_reduce_->second))
                            .view(part_of_all_reduce_->second));
  }
  for (const auto& [reduction, ranks] : reductions_) value = value_of_terms(*reduction, value, ranks);
  return reduces() && value.scalar_type() != dtype_ ? value.to(dtype_) : value;
}

}  // namespace tessera

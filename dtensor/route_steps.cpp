#include "tessera/dtensor/route_steps.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "tessera/dtensor/region.h"
#include "tessera/mesh/collectives.h"
#include "tessera/placement/exchange.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;

// One step at this rank: what all kinds of steps look at.
struct Place {
  Place(const PlanStep& plan_step, const Plan& whole_plan, const DeviceMesh& device_mesh)
      : step(plan_step),
        mesh(device_mesh),
        shape(whole_plan.shape()),
        mesh_shape(mesh.mesh().shape()),
        coordinate(*mesh.coordinate()),
        group(mesh_shape, step.mesh_dims) {}

  const PlanStep& step;
  const DeviceMesh& mesh;
  const std::vector<int64_t>& shape;
  const std::vector<int64_t>& mesh_shape;
  const std::vector<int64_t>& coordinate;
  const MergedDims group;

  Tile source() const { return local_tile(shape, step.from, mesh_shape, coordinate); }
  Tile target() const { return local_tile(shape, step.to, mesh_shape, coordinate); }
  Tile source_of(int64_t member) const {
    return local_tile(shape, step.from, mesh_shape, group.coordinate_of(coordinate, member));
  }
  Tile target_of(int64_t member) const {
    return local_tile(shape, step.to, mesh_shape, group.coordinate_of(coordinate, member));
  }
};

Counts counts_of(const std::vector<Region>& regions) {
  Counts out;
  for (const Region& region : regions) out.push_back(region.numel());
  return out;
}

int64_t sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// Whether the regions lie one after the other from the tensor's first element on, so that the tensor itself is what they make
// when packed.
bool in_sequence(const std::vector<Region>& regions) {
  int64_t next = 0;
  for (const Region& region : regions) {
    if (region.numel() > 0 && region.flat_offset() != next) return false;
    next += region.numel();
  }
  return true;
}

// What regions of a tensor make, packed one after the other; the tensor itself where that is the same.
at::Tensor packed(const at::Tensor& tensor, const std::vector<Region>& regions, bool sequence) {
  const int64_t total = sum(counts_of(regions));
  if (sequence) return tensor.view({-1}).narrow(0, 0, total);
  const at::Tensor out = at::empty({total}, tensor.options());
  int64_t offset = 0;
  for (const Region& region : regions) {
    region.pack(tensor, out, offset);
    offset += region.numel();
  }
  return out;
}

// A tensor of `sizes` of what was packed from its regions.
at::Tensor unpacked(const at::Tensor& flat, const std::vector<Region>& regions, const std::vector<int64_t>& sizes,
                    bool sequence) {
  if (sequence) return flat.view(sizes);
  at::Tensor out = at::empty(sizes, flat.options());
  int64_t offset = 0;
  for (const Region& region : regions) {
    region.unpack(flat, offset, out);
    offset += region.numel();
  }
  return out;
}

at::Tensor row_major(const at::Tensor& piece) { return piece.resolve_conj().resolve_neg().contiguous(); }

// ---- nothing is sent --------------------------------------------------------------------------------------------------

// Slices what becomes a Shard and forms what becomes a Partial.
class LocalStep final : public Route::Step {
 public:
  explicit LocalStep(const Place& at)
      : slice_(Region::within(at.source(), intersect(at.source(), at.target()))), sizes_(shape_of(at.target())) {
    for (std::size_t i = 0; i < at.mesh_shape.size(); ++i) {
      const Placement& from = at.step.from[i];
      const Placement& to = at.step.to[i];
      if (from == to && from.is_partial() && !from.reduction().slope(1)) pending_ = from.reduction_ptr();
      if (from == to || !to.is_partial()) continue;
      (from.is_shard() ? embedded_ : formed_)
          .push_back({.reduction = to.reduction_ptr(), .coordinate = at.coordinate[i], .ranks = at.mesh_shape[i]});
    }
    if (embedded_.empty() && formed_.empty()) pending_ = nullptr;
    if (!embedded_.empty()) inside_ = Region::within(at.target(), intersect(at.source(), at.target()));
  }

  at::Tensor run(const DeviceMesh&, const at::Tensor& piece) const override {
    // A slice keeps the piece's order in memory.
    at::Tensor out = slice_.is_box() ? slice_.read(piece) : slice_.read(row_major(piece));
    if (pending_) out = pending_->from_terms(pending_->to_term(out), 1);
    if (!embedded_.empty()) out = embed(row_major(out));
    for (const Forming& each : formed_) out = each.reduction->spread(out, each.coordinate, each.ranks);
    return out;
  }

 private:
  struct Forming {
    ReductionPtr reduction;
    int64_t coordinate;
    int64_t ranks;
  };

  // The piece of the only rank that has these elements, among neutral ones.
  at::Tensor embed(const at::Tensor& piece) const {
    at::Tensor only = piece;
    for (const Forming& each : embedded_) only = each.reduction->only_piece(only, each.ranks);
    at::Tensor out = at::full(sizes_, embedded_[0].reduction->neutral(piece.scalar_type()), piece.options());
    inside_->unpack(only.contiguous(), 0, out);
    return out;
  }

  const Region slice_;
  std::optional<Region> inside_;
  const std::vector<int64_t> sizes_;
  std::vector<Forming> formed_;  // of the whole value
  // That stays pending on other mesh dimensions: a piece of it alone may be what no value is, such as a norm's negative one.
  ReductionPtr pending_;
  std::vector<Forming> embedded_;  // of a Shard's piece
};

// ---- elements move ----------------------------------------------------------------------------------------------------

class GatherStep final : public Route::Step {
 public:
  explicit GatherStep(const Place& at) : mesh_dims_(at.step.mesh_dims), sizes_(shape_of(at.target())) {
    const Tile target = at.target();
    for (int64_t i = 0; i < at.group.size(); ++i) pieces_.push_back(Region::within(target, at.source_of(i)));
    counts_ = counts_of(pieces_);
    sequence_ = in_sequence(pieces_);
  }

  at::Tensor run(const DeviceMesh& mesh, const at::Tensor& piece) const override {
    return unpacked(all_gather(row_major(piece).view({-1}), counts_, mesh.merged(mesh_dims_), 0), pieces_, sizes_,
                    sequence_);
  }

 private:
  const std::vector<int64_t> mesh_dims_;
  const std::vector<int64_t> sizes_;
  std::vector<Region> pieces_;  // of each member, in the result
  Counts counts_;
  bool sequence_ = false;
};

// Each rank's part that stays goes the way of the others where it would otherwise break a sequence, else from tile to tile.
class ExchangeStep final : public Route::Step {
 public:
  explicit ExchangeStep(const Place& at)
      : mesh_dims_(at.step.mesh_dims),
        permutes_(at.step.kind == PlanStep::Kind::kPermute),
        me_(static_cast<std::size_t>(at.group.index_of(at.coordinate))),
        sizes_(shape_of(at.target())) {
    const Exchange exchange = exchange_of(at.shape, at.step.from, at.step.to, at.mesh_shape, at.group, at.coordinate);
    for (std::size_t i = 0; i < exchange.sends.size(); ++i) {
      sends_.push_back(Region::within(exchange.source, i == me_ ? exchange.receives[i] : exchange.sends[i]));
      receives_.push_back(Region::within(exchange.target, exchange.receives[i]));
    }
    send_sequence_ = in_sequence(sends_);
    receive_sequence_ = in_sequence(receives_);
    if (!send_sequence_ && !receive_sequence_) {
      const std::vector<int64_t> nothing(at.shape.size(), 0);
      stays_ = {sends_[me_], receives_[me_]};
      sends_[me_] = receives_[me_] = Region(Tile(at.shape.size()), nothing);
    }
    send_counts_ = counts_of(sends_);
    receive_counts_ = counts_of(receives_);
  }

  at::Tensor run(const DeviceMesh& mesh, const at::Tensor& given) const override {
    const at::Tensor piece = row_major(given);
    const auto move = permutes_ ? permute : all_to_all;
    const at::Tensor received =
        move(packed(piece, sends_, send_sequence_), send_counts_, receive_counts_, mesh.merged(mesh_dims_), 0);
    at::Tensor out = unpacked(received, receives_, sizes_, receive_sequence_);
    if (!stays_.empty()) stays_[0].copy(piece, stays_[1], out);
    return out;
  }

 private:
  const std::vector<int64_t> mesh_dims_;
  const bool permutes_;
  const std::size_t me_;
  const std::vector<int64_t> sizes_;
  std::vector<Region> sends_, receives_;
  std::vector<Region> stays_;  // where the part that stays was and is, when it is not among those
  Counts send_counts_, receive_counts_;
  bool send_sequence_ = false;
  bool receive_sequence_ = false;
};

// ---- reductions are carried out ----------------------------------------------------------------------------------------

class ReduceStep : public Route::Step {
 public:
  explicit ReduceStep(const Place& at) : mesh_dims_(at.step.mesh_dims) {
    for (const int64_t mesh_dim : at.step.mesh_dims) {
      const auto i = static_cast<std::size_t>(mesh_dim);
      const ReductionPtr reduction = at.step.from[i].reduction_ptr();
      const auto same = [&](const auto& one) { return *one.first == *reduction; };
      const auto found = std::ranges::find_if(reductions_, same);
      if (found == reductions_.end()) {
        reductions_.emplace_back(reduction, at.mesh_shape[i]);
      } else {
        found->second *= at.mesh_shape[i];
      }
    }
  }

 protected:
  DeviceMesh over(const DeviceMesh& mesh) const { return mesh.merged(mesh_dims_); }
  ReduceOp op() const { return reductions_[0].first->op(); }
  at::Tensor terms_of(const at::Tensor& piece) const {
    at::Tensor out = piece;
    for (const auto& [reduction, ranks] : reductions_) out = reduction->to_term(out);
    return row_major(out);
  }
  // `terms` are not the caller's.
  at::Tensor value_of(const at::Tensor& terms) const {
    at::Tensor out = terms;
    for (const auto& [reduction, ranks] : reductions_) out = reduction->from_terms(out, ranks);
    return out;
  }

 private:
  const std::vector<int64_t> mesh_dims_;
  std::vector<std::pair<ReductionPtr, int64_t>> reductions_;  // that are carried out together, each over so many ranks
};

class AllReduceStep final : public ReduceStep {
 public:
  explicit AllReduceStep(const Place& at) : ReduceStep(at), slice_(Region::within(at.source(), at.target())) {}
  at::Tensor run(const DeviceMesh& mesh, const at::Tensor& piece) const override {
    return value_of(all_reduce(terms_of(slice_.read(row_major(piece))), over(mesh), 0, op()));
  }

 private:
  const Region slice_;  // what is needed of the value
};

class ReduceScatterStep final : public ReduceStep {
 public:
  explicit ReduceScatterStep(const Place& at) : ReduceStep(at), sizes_(shape_of(at.target())) {
    const Tile source = at.source();
    for (int64_t i = 0; i < at.group.size(); ++i) pieces_.push_back(Region::within(source, at.target_of(i)));
    counts_ = counts_of(pieces_);
    sequence_ = in_sequence(pieces_);
  }

  at::Tensor run(const DeviceMesh& mesh, const at::Tensor& piece) const override {
    const at::Tensor rows = packed(terms_of(row_major(piece)), pieces_, sequence_);
    return value_of(reduce_scatter(rows, counts_, over(mesh), 0, op()).view(sizes_));
  }

 private:
  const std::vector<int64_t> sizes_;
  std::vector<Region> pieces_;  // of each member, in this rank's piece
  Counts counts_;
  bool sequence_ = false;
};

}  // namespace

std::unique_ptr<const Route::Step> make_step(const PlanStep& step, const Plan& plan, const DeviceMesh& mesh) {
  const Place at(step, plan, mesh);
  switch (step.kind) {
    case PlanStep::Kind::kLocal: return std::make_unique<LocalStep>(at);
    case PlanStep::Kind::kAllGather: return std::make_unique<GatherStep>(at);
    case PlanStep::Kind::kAllToAll:
    case PlanStep::Kind::kPermute: return std::make_unique<ExchangeStep>(at);
    case PlanStep::Kind::kAllReduce: return std::make_unique<AllReduceStep>(at);
    case PlanStep::Kind::kReduceScatter: return std::make_unique<ReduceScatterStep>(at);
  }
  return nullptr;
}

}  // namespace tessera

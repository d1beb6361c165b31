#include "tessera/bench/raw_route.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/collectives/gloo_choice.h"
#include "tessera/placement/exchange.h"

namespace tessera::bench {
namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Counts = std::vector<int64_t>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Describes a range in each dimension of a tensor.
struct Box {
  std::vector<int64_t> begins;
  std::vector<int64_t> sizes;

  int64_t numel() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }
  at::Tensor in(const at::Tensor& tensor) const {
    at::Tensor out = tensor;
    for (std::size_t d = 0; d < sizes.size(); ++d) out = out.narrow(static_cast<int64_t>(d), begins[d], sizes[d]);
    return out;
  }
};

Box box_of(const Tile& whole, const Tile& part) {
  Box out;
  for (std::size_t d = 0; d < part.size(); ++d) {
    if (part[d].size() > 1 || whole[d].size() > 1) throw std::logic_error("raw route: a tile that is not one box");
    const bool empty = part[d].empty();
    out.begins.push_back(empty ? 0 : part[d][0].begin - whole[d][0].begin);
    out.sizes.push_back(empty ? 0 : part[d][0].size());
  }
  return out;
}

// Returns whether the boxes of a tensor of `sizes` are adjacent in memory, so that nothing must be packed: they are
// slices of the first dimension whose size is above 1.
bool rows_in_order(const std::vector<Box>& boxes, const std::vector<int64_t>& sizes) {
  const auto cut = static_cast<std::size_t>(
      std::find_if(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; }) - sizes.begin());
  int64_t next = 0;
  for (const Box& box : boxes) {
    if (box.numel() == 0) continue;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      if (d != cut && box.sizes[d] != sizes[d]) return false;
    }
    if (cut < sizes.size() && box.begins[cut] != next) return false;
    if (cut < sizes.size()) next += box.sizes[cut];
  }
  return true;
}

Counts counts_of(const std::vector<Box>& boxes) {
  Counts out;
  for (const Box& box : boxes) out.push_back(box.numel());
  return out;
}

int64_t sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

void copy_into(const at::Tensor& flat, const std::vector<Box>& boxes, const at::Tensor& tensor, bool pack) {
  int64_t offset = 0;
  for (const Box& box : boxes) {
    const at::Tensor part = flat.narrow(0, offset, box.numel()).view(box.sizes);
    if (box.numel() > 0) {
      if (pack) {
        part.copy_(box.in(tensor));
      } else {
        box.in(tensor).copy_(part);
      }
    }
    offset += box.numel();
  }
}

// Describes one step on this rank.
struct StepOnRank {
  StepOnRank(const PlanStep& plan_step, const Plan& whole_plan, const DeviceMesh& device_mesh)
      : step(plan_step),
        plan(whole_plan),
        mesh(device_mesh),
        coordinate(*mesh.coordinate()),
        group(mesh.mesh().shape(), step.mesh_dims),
        me(static_cast<std::size_t>(group.index_of(coordinate))),
        source(tile(step.from, coordinate)),
        target(tile(step.to, coordinate)) {}

  Tile tile(const Placements& placements, const std::vector<int64_t>& at) const {
    return local_tile(plan.shape(), placements, mesh.mesh().shape(), at);
  }
  Tile tile_of(const Placements& placements, int64_t member) const {
    return tile(placements, group.coordinate_of(coordinate, member));
  }
  Backend backend() const { return mesh.merged(step.mesh_dims).group(0); }

  const PlanStep& step;
  const Plan& plan;
  const DeviceMesh& mesh;
  const std::vector<int64_t>& coordinate;
  const MergedDims group;
  const std::size_t me;
  const Tile source, target;
};

at::Tensor buffer(int64_t count) { return at::empty({count}, at::kFloat); }

void exchange(const Backend& backend, at::Tensor to, at::Tensor from, Counts send, Counts receive) {
  backend->alltoall_base(to, from, receive, send)->wait();
}

class Local final : public RawRoute::Step {
 public:
  explicit Local(const StepOnRank& at)
      : slice_(box_of(at.source, intersect(at.source, at.target))), sizes_(shape_of(at.target)) {
    inside_ = box_of(at.target, intersect(at.source, at.target));
    for (std::size_t i = 0; i < at.step.to.size(); ++i) {
      if (at.step.from[i] == at.step.to[i] || !at.step.to[i].is_partial()) continue;
      if (at.step.from[i].is_shard()) {
        embeds_ = true;
      } else {
        zero_ |= at.coordinate[i] != 0;
      }
    }
  }
  at::Tensor run(const at::Tensor& piece) const override {
    if (zero_) return at::zeros(sizes_, piece.options());
    if (!embeds_) return slice_.in(piece);
    at::Tensor out = at::zeros(sizes_, piece.options());
    inside_.in(out).copy_(slice_.in(piece));
    return out;
  }

 private:
  const Box slice_;
  Box inside_;
  const std::vector<int64_t> sizes_;
  bool embeds_ = false;
  bool zero_ = false;
};

class Gather final : public RawRoute::Step {
 public:
  explicit Gather(const StepOnRank& at)
      : backend_(at.backend()),
        me_(at.me),
        sizes_(shape_of(at.target)),
        is_gloo_(backend_->getBackendName() == "gloo") {
    for (int64_t i = 0; i < at.group.size(); ++i) boxes_.push_back(box_of(at.target, at.tile_of(at.step.from, i)));
    counts_ = counts_of(boxes_);
    in_order_ = rows_in_order(boxes_, sizes_);
    if (!in_order_) packed_ = buffer(sum(counts_));
    even_ = std::ranges::all_of(counts_, [&](int64_t count) { return count == counts_[0]; });
    if (is_gloo_ && !by_messages()) repeated_ = buffer(counts_[me_] * at.group.size());
    out_ = at::empty(sizes_, at::kFloat);
  }

  at::Tensor run(const at::Tensor& piece) const override {
    at::Tensor flat = in_order_ ? out_.view({-1}) : packed_;
    at::Tensor mine = piece.contiguous().view({-1});
    if (is_gloo_ && by_messages()) {
      gather_by_messages(flat, mine);
    } else if (repeated_.defined()) {
      for (int64_t i = 0; i < static_cast<int64_t>(counts_.size()); ++i) {
        repeated_.narrow(0, i * mine.numel(), mine.numel()).copy_(mine);
      }
      exchange(backend_, flat, repeated_, Counts(counts_.size(), mine.numel()), counts_);
    } else if (even_) {
      backend_->_allgather_base(flat, mine)->wait();
    } else {
      std::vector<std::vector<at::Tensor>> slots = {flat.split_with_sizes(counts_)};
      std::vector<at::Tensor> pieces = {mine};
      backend_->allgather(slots, pieces)->wait();
    }
    if (!in_order_) copy_into(flat, boxes_, out_, /*pack=*/false);
    return out_;
  }

 private:
  bool by_messages() const { return !gloo_gathers_at_once(std::ssize(counts_), sum(counts_) * 4); }

  void gather_by_messages(const at::Tensor& flat, const at::Tensor& mine) const {
    const std::vector<at::Tensor> slots = flat.split_with_sizes(counts_);
    const std::size_t n = slots.size();
    std::vector<Work> works;
    for (std::size_t i = 1; i < n; ++i) {
      const std::size_t peer = (me_ + n - i) % n;
      std::vector<at::Tensor> slot = {slots[peer]};
      if (slot[0].numel() > 0) works.push_back(backend_->recv(slot, static_cast<int>(peer), 0));
    }
    std::vector<at::Tensor> piece = {mine};
    for (std::size_t i = 1; i < n && mine.numel() > 0; ++i) {
      works.push_back(backend_->send(piece, static_cast<int>((me_ + i) % n), 0));
    }
    slots[me_].copy_(mine);
    for (const Work& work : works) work->wait();
  }

  const Backend backend_;
  const std::size_t me_;
  const std::vector<int64_t> sizes_;
  const bool is_gloo_;
  std::vector<Box> boxes_;
  Counts counts_;
  bool in_order_ = false;
  bool even_ = false;
  at::Tensor packed_, repeated_, out_;
};

class Exchanging final : public RawRoute::Step {
 public:
  explicit Exchanging(const StepOnRank& at) : backend_(at.backend()), sizes_(shape_of(at.target)) {
    const Exchange exchange =
        exchange_of(at.plan.shape(), at.step.from, at.step.to, at.mesh.mesh().shape(), at.group, at.coordinate);
    for (std::size_t i = 0; i < exchange.sends.size(); ++i) {
      sends_.push_back(box_of(exchange.source, i == at.me ? exchange.receives[i] : exchange.sends[i]));
      receives_.push_back(box_of(exchange.target, exchange.receives[i]));
    }
    sends_in_order_ = rows_in_order(sends_, shape_of(exchange.source));
    receives_in_order_ = rows_in_order(receives_, sizes_);
    if (!sends_in_order_ && !receives_in_order_) {
      kept_ = {sends_[at.me], receives_[at.me]};
      for (Box* box : {&sends_[at.me], &receives_[at.me]}) box->sizes.assign(sizes_.size(), 0);
    }
    send_counts_ = counts_of(sends_);
    receive_counts_ = counts_of(receives_);
    if (!sends_in_order_) packed_ = buffer(sum(send_counts_));
    if (!receives_in_order_) received_ = buffer(sum(receive_counts_));
    out_ = at::empty(sizes_, at::kFloat);
  }

  at::Tensor run(const at::Tensor& given) const override {
    const at::Tensor piece = given.contiguous();
    const at::Tensor& out = out_;
    if (!sends_in_order_) copy_into(packed_, sends_, piece, /*pack=*/true);
    const at::Tensor from = sends_in_order_ ? piece.view({-1}).narrow(0, 0, sum(send_counts_)) : packed_;
    exchange(backend_, receives_in_order_ ? out.view({-1}) : received_, from, send_counts_, receive_counts_);
    if (!receives_in_order_) copy_into(received_, receives_, out, /*pack=*/false);
    if (!kept_.empty()) kept_[1].in(out).copy_(kept_[0].in(piece));
    return out;
  }

 private:
  const Backend backend_;
  const std::vector<int64_t> sizes_;
  std::vector<Box> sends_, receives_, kept_;
  Counts send_counts_, receive_counts_;
  bool sends_in_order_ = false;
  bool receives_in_order_ = false;
  at::Tensor packed_, received_, out_;
};

class AllReduce final : public RawRoute::Step {
 public:
  explicit AllReduce(const StepOnRank& at) : backend_(at.backend()) {
    const GroupTiles all = group_tiles_of(at.plan.shape(), at.step.to, at.mesh.mesh().shape(), at.group, at.coordinate);
    for (const Tile& tile : all.tiles) boxes_.push_back(box_of(at.source, tile));
    const Counts counts = counts_of(boxes_);
    const int64_t n = at.group.size();
    const int64_t count = sum(counts);
    terms_ = buffer(count);
    own_ = terms_.narrow(0, sum(Counts(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(all.own))),
                         counts[all.own]);
    out_ = at::empty(shape_of(at.target), at::kFloat);
    if (backend_->getBackendName() != "gloo" || !gloo_reduces_at_once(n, count * 4)) return;
    repeated_ = buffer(n * count).view({n, count});
    received_ = buffer(n * count).view({n, count});
  }
  at::Tensor run(const at::Tensor& piece) const override {
    copy_into(terms_, boxes_, piece, /*pack=*/true);
    if (repeated_.defined()) {
      repeated_.copy_(terms_.expand_as(repeated_));
      const Counts counts(static_cast<std::size_t>(repeated_.size(0)), repeated_.size(1));
      exchange(backend_, received_.view({-1}), repeated_.view({-1}), counts, counts);
      at::Tensor flat = terms_;
      at::sum_out(flat, received_, 0);
    } else {
      std::vector<at::Tensor> tensors = {terms_};
      backend_->allreduce(tensors)->wait();
    }
    if (boxes_.size() == 1) return terms_.view(out_.sizes());
    out_.view({-1}).copy_(own_);
    return out_;
  }

 private:
  const Backend backend_;
  std::vector<Box> boxes_;
  at::Tensor terms_, own_, repeated_, received_, out_;
};

class ReduceScatter final : public RawRoute::Step {
 public:
  explicit ReduceScatter(const StepOnRank& at) : backend_(at.backend()), me_(at.me), sizes_(shape_of(at.target)) {
    for (int64_t i = 0; i < at.group.size(); ++i) boxes_.push_back(box_of(at.source, at.tile_of(at.step.to, i)));
    counts_ = counts_of(boxes_);
    in_order_ = rows_in_order(boxes_, shape_of(at.source));
    if (!in_order_) packed_ = buffer(sum(counts_));
    const bool even = std::ranges::all_of(counts_, [&](int64_t count) { return count == counts_[0]; });
    if (!even || backend_->getBackendName() == "gloo") received_ = buffer(counts_[me_] * at.group.size());
    out_ = at::empty(sizes_, at::kFloat);
  }

  at::Tensor run(const at::Tensor& piece) const override {
    at::Tensor from = in_order_ ? piece.contiguous().view({-1}) : packed_;
    if (!in_order_) copy_into(packed_, boxes_, piece, /*pack=*/true);
    if (received_.defined()) {
      const auto n = static_cast<int64_t>(counts_.size());
      exchange(backend_, received_, from, counts_, Counts(counts_.size(), counts_[me_]));
      at::Tensor flat = out_.view({-1});
      at::sum_out(flat, received_.view({n, counts_[me_]}), 0);
      return out_;
    }
    at::Tensor flat = out_.view({-1});
    backend_->_reduce_scatter_base(flat, from)->wait();
    return out_;
  }

 private:
  const Backend backend_;
  const std::size_t me_;
  const std::vector<int64_t> sizes_;
  std::vector<Box> boxes_;
  Counts counts_;
  bool in_order_ = false;
  at::Tensor packed_, received_, out_;
};

std::unique_ptr<const RawRoute::Step> make_step(const StepOnRank& at) {
  switch (at.step.kind) {
    case PlanStep::Kind::kLocal: return std::make_unique<Local>(at);
    case PlanStep::Kind::kAllGather: return std::make_unique<Gather>(at);
    case PlanStep::Kind::kAllToAll:
    case PlanStep::Kind::kPermute: return std::make_unique<Exchanging>(at);
    case PlanStep::Kind::kAllReduce: return std::make_unique<AllReduce>(at);
    case PlanStep::Kind::kReduceScatter: return std::make_unique<ReduceScatter>(at);
  }
  return nullptr;
}

}  // namespace

RawRoute::RawRoute(const Plan& plan, const DeviceMesh& mesh) {
  for (const PlanStep& step : plan.steps()) steps_.push_back(make_step(StepOnRank(step, plan, mesh)));
}

at::Tensor RawRoute::run(const at::Tensor& local) const {
  at::Tensor piece = local;
  for (const auto& step : steps_) piece = step->run(piece);
  return piece.is_alias_of(local) ? piece.clone(at::MemoryFormat::Contiguous) : piece.contiguous();
}

}  // namespace tessera::bench

#include "tessera/dtensor/run_plan.h"

#include <limits>
#include <stdexcept>

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/collectives.h"

namespace tessera {
namespace {

c10::Scalar lowest(at::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) return -std::numeric_limits<double>::infinity();
  if (dtype == at::kBool) return false;
  if (dtype == at::kByte) return 0;
  const int bits = static_cast<int>(c10::elementSize(dtype)) * 8;
  return std::numeric_limits<int64_t>::min() >> (64 - bits);
}

c10::Scalar highest(at::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) return std::numeric_limits<double>::infinity();
  if (dtype == at::kBool) return true;
  if (dtype == at::kByte) return 255;
  const int bits = static_cast<int>(c10::elementSize(dtype)) * 8;
  return std::numeric_limits<int64_t>::max() >> (64 - bits);
}

// The value x for which op(x, y) == y.
c10::Scalar neutral(ReduceOp op, at::ScalarType dtype) {
  switch (op) {
    case ReduceOp::kSum: return 0;
    case ReduceOp::kProduct: return 1;
    case ReduceOp::kMax: return lowest(dtype);
    case ReduceOp::kMin: return highest(dtype);
    case ReduceOp::kAvg: break;
  }
  throw std::logic_error("neutral: avg has no neutral element");
}

at::Tensor pad_to(const at::Tensor& t, int64_t dim, int64_t size) {
  if (t.size(dim) == size) return t;
  std::vector<int64_t> pad(static_cast<std::size_t>(2 * (t.dim() - dim)), 0);
  pad.back() = size - t.size(dim);
  return at::constant_pad_nd(t, pad, 0);
}

// One step at one place: the mesh dimension, its size n and this rank's coordinate there.
class StepRunner {
 public:
  StepRunner(const Spec& spec, const PlanStep& step, const Placements& current)
      : mesh_(spec.mesh),
        step_(step),
        n_(spec.mesh.size(step.mesh_dim)),
        me_(spec.mesh.coordinate()->at(static_cast<std::size_t>(step.mesh_dim))) {
    Placements whole = current;
    whole[static_cast<std::size_t>(step.mesh_dim)] = Replicate();
    whole_ = local_shape(spec.sizes, whole, spec.mesh.mesh().shape(), *spec.mesh.coordinate());
  }

  at::Tensor run(const at::Tensor& local) const {
    const Placement& from = step_.from;
    const Placement& to = step_.to;
    if (from.is_replicate()) return to.is_shard() ? slice(local, to.tensor_dim()) : to_partial(local, to.op());
    if (from.is_partial()) {
      return to.is_shard() ? reduce_scatter_dim(local, to.tensor_dim(), from.op())
                           : all_reduce(local, mesh_, step_.mesh_dim, from.op());
    }
    return to.is_shard() ? all_to_all_dims(local, from.tensor_dim(), to.tensor_dim()) : gather_dim(local, from.tensor_dim());
  }

 private:
  int64_t whole(int64_t dim) const { return whole_[static_cast<std::size_t>(dim)]; }
  Range part(int64_t dim, int64_t i) const { return chunk_range(whole(dim), n_, i); }

  at::Tensor slice(const at::Tensor& local, int64_t dim) const {
    const Range range = part(dim, me_);
    return local.narrow(dim, range.offset, range.size);
  }

  at::Tensor to_partial(const at::Tensor& local, ReduceOp op) const {
    if (me_ == 0 || op == ReduceOp::kAvg) return local;
    return at::full_like(local, neutral(op, local.scalar_type()));
  }

  at::Tensor gather_dim(const at::Tensor& local, int64_t dim) const {
    const at::Tensor gathered = all_gather(pad_to(local, dim, part(dim, 0).size), mesh_, step_.mesh_dim);
    if (whole(dim) % n_ == 0) return gathered.movedim(0, dim).flatten(dim, dim + 1).contiguous();
    std::vector<at::Tensor> pieces;
    for (int64_t i = 0; i < n_; ++i) pieces.push_back(gathered.select(0, i).narrow(dim, 0, part(dim, i).size));
    return at::cat(pieces, dim);
  }

  at::Tensor reduce_scatter_dim(const at::Tensor& local, int64_t dim, ReduceOp op) const {
    const int64_t full = part(dim, 0).size;
    at::Tensor rows;
    if (whole(dim) % n_ == 0) {
      rows = local.unflatten(dim, {n_, full}).movedim(dim, 0);
    } else {
      std::vector<at::Tensor> pieces;
      for (int64_t i = 0; i < n_; ++i) {
        const Range range = part(dim, i);
        pieces.push_back(pad_to(local.narrow(dim, range.offset, range.size), dim, full));
      }
      rows = at::stack(pieces);
    }
    return reduce_scatter(rows, mesh_, step_.mesh_dim, op).narrow(dim, 0, part(dim, me_).size);
  }

  // This rank's piece of `from`, cut along `to`, goes to everyone; what comes has this rank's piece of `to`.
  at::Tensor all_to_all_dims(const at::Tensor& local, int64_t from, int64_t to) const {
    std::vector<at::Tensor> out;
    std::vector<int64_t> send;
    std::vector<int64_t> receive;
    const int64_t mine_of_to = part(to, me_).size;
    int64_t rest = 1;
    for (int64_t d = 0; d < local.dim(); ++d) rest *= (d == from || d == to) ? 1 : local.size(d);
    for (int64_t i = 0; i < n_; ++i) {
      const Range range = part(to, i);
      out.push_back(local.narrow(to, range.offset, range.size).reshape({-1}));
      send.push_back(out.back().numel());
      receive.push_back(part(from, i).size * mine_of_to * rest);
    }
    const at::Tensor got = all_to_all(at::cat(out), send, receive, mesh_, step_.mesh_dim);
    std::vector<int64_t> shape = local.sizes().vec();
    shape[static_cast<std::size_t>(to)] = mine_of_to;
    std::vector<at::Tensor> pieces;
    int64_t offset = 0;
    for (int64_t i = 0; i < n_; ++i) {
      shape[static_cast<std::size_t>(from)] = part(from, i).size;
      const int64_t count = receive[static_cast<std::size_t>(i)];
      pieces.push_back(got.narrow(0, offset, count).view(shape));
      offset += count;
    }
    return at::cat(pieces, from);
  }

  const DeviceMesh& mesh_;
  const PlanStep& step_;
  int64_t n_;
  int64_t me_;
  std::vector<int64_t> whole_;  // this rank's local shape if the step's mesh dimension split nothing
};

}  // namespace

at::Tensor run_plan(const at::Tensor& local, const Spec& spec, const Plan& plan) {
  if (!spec.mesh.is_member()) return local;
  Placements current = spec.placements;
  at::Tensor out = local;
  CheckState& checks = spec.mesh.world().check_state();
  for (const PlanStep& step : plan) {
    const CheckedStep named(checks, checks.enabled ? fmt::format("{} -> {}", to_string(step.from), to_string(step.to)) : "");
    out = StepRunner(spec, step, current).run(out);
    current[static_cast<std::size_t>(step.mesh_dim)] = step.to;
  }
  return out;
}

at::Tensor redistribute_local(const at::Tensor& local, const Spec& spec, const Placements& to) {
  if (spec.placements == to) return local;
  check_partials(to, spec.dtype, "redistribute");
  return run_plan(local, spec, plan_redistribute(spec.placements, to, spec.mesh.mesh().shape()));
}

void check_partials(const Placements& placements, at::ScalarType dtype, const char* who) {
  if (!partials_commute(placements)) {
    throw std::invalid_argument(
        fmt::format("{}: {} has two kinds of reductions pending, whose order would matter; only sum and "
                    "avg go together. Redistribute one of them to Replicate or Shard first",
                    who, to_string(placements)));
  }
  for (const Placement& p : placements) {
    if (!p.is_partial()) continue;
    const bool ordered = p.op() == ReduceOp::kMax || p.op() == ReduceOp::kMin;
    if (dtype == at::kBool && !ordered) {
      throw std::invalid_argument(
          fmt::format("{}: {} of bool has no meaning; convert the tensor first, or use P(max) for any and P(min) for all",
                      who, to_string(p)));
    }
    if (p.is_partial(ReduceOp::kAvg) && c10::isIntegralType(dtype, true)) {
      throw std::invalid_argument(
          fmt::format("{}: {} of {} cannot be exact; convert the tensor to a floating type or use P(sum)", who, to_string(p),
                      c10::toString(dtype)));
    }
    if (ordered && c10::isComplexType(dtype)) {
      throw std::invalid_argument(fmt::format("{}: {} of {} has no order", who, to_string(p), c10::toString(dtype)));
    }
  }
}

}  // namespace tessera

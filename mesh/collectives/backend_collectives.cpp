#include "tessera/mesh/collectives/backend_collectives.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "tessera/mesh/collectives/exchange_rounds.h"
#include "tessera/mesh/collectives/gloo_choice.h"
#include "tessera/mesh/core/reused_memory.h"
#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;

c10d::ReduceOp::RedOpType backend_op(ReduceOp op, bool averages) {
  switch (op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg: return averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kBitAnd: return c10d::ReduceOp::BAND;
    case ReduceOp::kBitOr: return c10d::ReduceOp::BOR;
    case ReduceOp::kBitXor: return c10d::ReduceOp::BXOR;
  }
  throw std::logic_error("backend_op: not a ReduceOp");
}

bool on_cpu(const CollectiveCall& call) { return call.mesh.device_type() == c10::DeviceType::CPU; }

// Returns whether the tensors of a GPU go over Gloo. Gloo moves the host's memory: they are copied there, and the
// results back.
bool is_staged(const CollectiveCall& call) { return !on_cpu(call) && call.group()->getBackendName() == "gloo"; }
at::Tensor in_host_memory(const CollectiveCall& call, const at::Tensor& input) {
  return input.defined() && is_staged(call) ? input.cpu() : input;
}
BackendWork on_mesh_device(const CollectiveCall& call, BackendWork work) {
  if (is_staged(call)) work.then([device = call.mesh.device()](const at::Tensor& output) { return output.to(device); });
  return work;
}
bool moves_host_memory(const CollectiveCall& call) { return on_cpu(call) || is_staged(call); }

// Returns whether the host's memory is sent by this backend. Gloo alone needs other ways: the collectives of MPI and of
// the in-memory group are as fast as messages.
bool over(const char* backend, const CollectiveCall& call) {
  return moves_host_memory(call) && call.group()->getBackendName() == backend;
}
bool over_gloo(const CollectiveCall& call) { return over("gloo", call); }

// Returns whether the backends lack this reduction, so that the terms are gathered and reduced here: products of
// complex numbers, and bitwise reductions on CUDA.
bool reduces_here_alone(const CollectiveCall& call, const at::Tensor& terms, ReduceOp op) {
  return (terms.is_complex() && op == ReduceOp::kProduct) || (is_bitwise(op) && !moves_host_memory(call));
}

bool equal(const Counts& counts) {
  return std::ranges::all_of(counts, [&](int64_t count) { return count == counts[0]; });
}

Counts times(Counts counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

// Starts the collective for which `start` returns one work, or null where the current stream does it: then nothing is
// to be waited for.
template <typename Start>
void start_one(const CollectiveCall& call, Works& works, const Start& start) {
  start_on_group(call, [&](c10d::Backend& group) {
    if (auto work = start(group)) works.push_back(std::move(work));
  });
}

bool over_nccl(const CollectiveCall& call) { return call.group()->getBackendName() == "nccl"; }

// Says whether the user makes the host wait for each collective over NCCL, by either of the names that LibTorch reads.
bool host_waits_for_nccl() {
  static const std::vector<std::string> names = {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"};
  const bool is_set = std::ranges::any_of(names, [](const auto& name) { return std::getenv(name.c_str()) != nullptr; });
  return is_set && c10d::getCvarBool(names, false);
}

// Only NCCL is told that the caller waits at once: other groups do the same in both cases. Where the host waits for
// each collective, it needs a work to wait for, with its time limit.
template <typename Options>
Options options_for(const CollectiveCall& call) {
  Options options;
  if (over_nccl(call) && !host_waits_for_nccl()) {
    options.asyncOp = call.wait_time == WaitTime::kLater;
  }
  return options;
}

// Returns `counts` with zeros outside [begin, end), and sets `offset` to the sum before, `size` to that within.
Counts part_of(const Counts& counts, int64_t begin, int64_t end, int64_t& offset, int64_t& size) {
  Counts out(counts.size(), 0);
  const auto first = counts.begin() + begin, last = counts.begin() + end;
  std::copy(first, last, out.begin() + begin);
  offset = std::accumulate(counts.begin(), first, int64_t{0});
  size = std::accumulate(first, last, int64_t{0});
  return out;
}

// Exchanges in rounds, so that NCCL gets no larger group of operations than kMostGroupedOperations.
void exchange_in_rounds(const CollectiveCall& call, Works& works, const at::Tensor& to, const at::Tensor& from,
                        const Counts& give, const Counts& take) {
  const auto options = options_for<c10d::AllToAllOptions>(call);
  for (const ExchangeRound& round : exchange_rounds(call.n(), call.mesh.local_rank(call.mesh_dim))) {
    int64_t offset = 0, size = 0;
    Counts gives = part_of(give, round.send_begin, round.send_end, offset, size);
    at::Tensor part_from = from.narrow(0, offset, size);
    Counts takes = part_of(take, round.receive_begin, round.receive_end, offset, size);
    at::Tensor part_to = to.narrow(0, offset, size);
    start_one(call, works,
              [&](c10d::Backend& group) { return group.alltoall_base(part_to, part_from, takes, gives, options); });
  }
}

void exchange_into(const CollectiveCall& call, Works& works, const at::Tensor& output, const at::Tensor& input,
                   const Counts& send, const Counts& receive) {
  Counts give = times(send, input.element_size()), take = times(receive, input.element_size());
  at::Tensor to = as_bytes(output), from = as_bytes(input);
  if (over_nccl(call) && 2 * call.n() > kMostGroupedOperations) {
    exchange_in_rounds(call, works, to, from, give, take);
    return;
  }
  const auto options = options_for<c10d::AllToAllOptions>(call);
  start_one(call, works, [&](c10d::Backend& group) { return group.alltoall_base(to, from, take, give, options); });
}

// Scatters by an exchange, in which the source alone sends.
void scatter_in_rounds(const CollectiveCall& call, Works& works, const at::Tensor& output, const at::Tensor& input,
                       int64_t source) {
  const at::Tensor to = as_bytes(output);
  const at::Tensor from = input.defined() ? as_bytes(input) : to.narrow(0, 0, 0);
  Counts give(static_cast<std::size_t>(call.n()), input.defined() ? to.numel() : 0), take(give.size(), 0);
  take[static_cast<std::size_t>(source)] = to.numel();
  exchange_in_rounds(call, works, to, from, give, take);
}

// Gathers with one message from each rank to each other one, without intermediate copies.
void gather_by_messages(const CollectiveCall& call, Works& works, const std::vector<at::Tensor>& slots,
                        const at::Tensor& mine) {
  constexpr int kTag = std::numeric_limits<int>::max() - 1;  // not one that a user's own messages would have
  const int64_t me = call.mesh.local_rank(call.mesh_dim);
  const auto peer = [&](int64_t distance) { return (me + distance) % call.n(); };
  start_on_group(call, [&](c10d::Backend& group) {
    for (int64_t i = 1; i < call.n(); ++i) {
      std::vector<at::Tensor> slot = {slots[static_cast<std::size_t>(peer(call.n() - i))]};
      if (slot[0].numel() > 0) works.push_back(group.recv(slot, static_cast<int>(peer(call.n() - i)), kTag));
    }
    std::vector<at::Tensor> piece = {mine};
    for (int64_t i = 1; i < call.n() && mine.numel() > 0; ++i) {
      works.push_back(group.send(piece, static_cast<int>(peer(i)), kTag));
    }
  });
  slots[static_cast<std::size_t>(me)].copy_(mine);
}

// Makes the flat output for counts[c] elements of each coordinate c, of `input`'s dtype.
BackendWork into_flat(const Counts& counts, const at::Tensor& input) {
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return {.works = {}, .output = reused_empty({sum}, input.options()), .input = input};
}

// Each rank sends counts[i] elements of the flat `terms` to coordinate i and reduces what it receives in the order of
// coordinates, in one pass. Gloo's own reduce-scatter is an all-reduce internally, and 1.9 to 4.2 times slower (2 and 4
// ranks, 64 B to 16 MiB).
BackendWork reduce_by_exchange(const CollectiveCall& call, const at::Tensor& terms, const Counts& counts, ReduceOp op) {
  const int64_t mine = counts[call.here()];
  const at::Tensor received = reused_empty({call.n(), mine}, terms.options());
  BackendWork out{.works = {}, .output = received, .input = terms, .rest = [op](const at::Tensor& rows) {
                    return reduce_rows(rows, op);
                  }};
  exchange_into(call, out.works, received.view({-1}), terms, counts, Counts(counts.size(), mine));
  return out;
}

// NCCL averages floating-point numbers itself, in the pass that adds them: it multiplies each term by 1/n, rounded to
// the dtype. That is exact where n is a power of two, but for terms of float16 near its smallest numbers; their sum
// could overflow instead. Elsewhere all results would be off in the same way, by 0.2% for three terms in bfloat16, so
// the sum is divided there.
bool averages_itself(const CollectiveCall& call, const at::Tensor& terms) {
  return over_nccl(call) && terms.is_floating_point() && std::has_single_bit(static_cast<uint64_t>(call.n()));
}

void divide_mean(const CollectiveCall& call, BackendWork& sum, ReduceOp op) {
  if (op == ReduceOp::kAvg && !averages_itself(call, sum.output)) {
    sum.then([n = call.n()](const at::Tensor& output) { return divide_by_count(output, n); });
  }
}

at::Tensor as_reals(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

at::Tensor flat_reals(const at::Tensor& flat) { return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat; }

BackendWork reduce_parts_by_backend(const CollectiveCall& call, const at::Tensor& terms, int64_t mine, ReduceOp op) {
  BackendWork out{.works = {}, .output = reused_empty({mine}, terms.options()), .input = terms};
  at::Tensor to = flat_reals(out.output), from = flat_reals(terms);
  auto options = options_for<c10d::ReduceScatterOptions>(call);
  options.reduceOp = backend_op(op, averages_itself(call, terms));
  start_one(call, out.works, [&](c10d::Backend& group) { return group._reduce_scatter_base(to, from, options); });
  divide_mean(call, out, op);
  return out;
}

BackendWork reduce_terms(const CollectiveCall& call, const at::Tensor& terms, ReduceOp op, bool owned) {
  if (over_gloo(call) && gloo_reduces_at_once(call.n(), static_cast<int64_t>(terms.nbytes()))) {
    const Counts counts(static_cast<std::size_t>(call.n()), terms.numel());
    BackendWork out = reduce_by_exchange(call, terms.view({-1}).repeat({call.n()}), counts, op);
    out.then([shape = terms.sizes().vec()](const at::Tensor& flat) { return flat.view(shape); });
    return out;
  }
  if (reduces_here_alone(call, terms, op)) {
    BackendWork out = gather_rows(call, terms);
    out.then([op](const at::Tensor& rows) { return reduce_rows(rows, op); });
    return out;
  }
  BackendWork out{.works = {}, .output = owned ? terms : reused_copy(terms)};
  std::vector<at::Tensor> tensors = {as_reals(out.output)};
  auto options = options_for<c10d::AllreduceOptions>(call);
  options.reduceOp = backend_op(op, averages_itself(call, terms));
  start_one(call, out.works, [&](c10d::Backend& group) { return group.allreduce(tensors, options); });
  divide_mean(call, out, op);
  return out;
}

}  // namespace

BackendWork exchange(const CollectiveCall& call, const at::Tensor& given, const Counts& send, const Counts& receive) {
  const at::Tensor input = in_host_memory(call, given);
  BackendWork out = into_flat(receive, input);
  exchange_into(call, out.works, out.output, input, send, receive);
  return on_mesh_device(call, std::move(out));
}

BackendWork gather(const CollectiveCall& call, const at::Tensor& given, const Counts& counts) {
  const at::Tensor input = in_host_memory(call, given);
  BackendWork out = into_flat(counts, input);
  at::Tensor to = as_bytes(out.output), from = as_bytes(input);
  const auto bytes = [&] { return times(counts, input.element_size()); };
  const bool even = equal(counts);
  const bool gloo = over_gloo(call);
  const auto options = options_for<c10d::AllgatherOptions>(call);
  if (gloo && !gloo_gathers_at_once(call.n(), to.numel())) {
    gather_by_messages(call, out.works, to.split_with_sizes(bytes()), from);
  } else if (gloo || (moves_host_memory(call) && !even && !over("mpi", call))) {
    out.input = from.repeat({call.n()});
    exchange_into(call, out.works, to, out.input, Counts(counts.size(), from.numel()), bytes());
  } else if (even) {
    start_one(call, out.works, [&](c10d::Backend& group) { return group._allgather_base(to, from, options); });
  } else {
    std::vector<std::vector<at::Tensor>> slots = {to.split_with_sizes(bytes())};
    std::vector<at::Tensor> pieces = {from};
    // NCCL's group makes broadcasts of it, of which its watchdog sees the end on the group's own stream alone.
    start_one(call, out.works, [&](c10d::Backend& group) { return group.allgather(slots, pieces); });
  }
  return on_mesh_device(call, std::move(out));
}

BackendWork gather_rows(const CollectiveCall& call, const at::Tensor& input) {
  BackendWork out = gather(call, input.view({-1}), Counts(static_cast<std::size_t>(call.n()), input.numel()));
  Counts shape = {call.n()};
  shape.insert(shape.end(), input.sizes().begin(), input.sizes().end());
  out.then([shape](const at::Tensor& flat) { return flat.view(shape); });
  return out;
}

BackendWork reduce_all(const CollectiveCall& call, const at::Tensor& terms, ReduceOp op, bool owned) {
  if (!is_staged(call)) return reduce_terms(call, terms, op, owned);
  BackendWork out = reduce_terms(call, terms.cpu(), op, /*owned=*/true);
  // The result may be the memory of `terms`, which is kept for the stream that waits; the host's input lives as long.
  out.then([terms, owned, sent = out.input](const at::Tensor& host) {
    return owned ? terms.copy_(host) : host.to(terms.device());
  });
  out.input = terms;
  return out;
}

BackendWork reduce_parts(const CollectiveCall& call, const at::Tensor& given, const Counts& counts, ReduceOp op) {
  const at::Tensor terms = in_host_memory(call, given);
  if (!equal(counts) || over_gloo(call) || reduces_here_alone(call, terms, op)) {
    return on_mesh_device(call, reduce_by_exchange(call, terms, counts, op));
  }
  return reduce_parts_by_backend(call, terms, counts[call.here()], op);
}

BackendWork broadcast_from(const CollectiveCall& call, const at::Tensor& given, int64_t source) {
  const at::Tensor fresh = in_host_memory(call, given);
  std::vector<at::Tensor> tensors = {as_bytes(fresh)};
  auto options = options_for<c10d::BroadcastOptions>(call);
  options.rootRank = source;
  BackendWork out{.works = {}, .output = fresh};
  start_one(call, out.works, [&](c10d::Backend& group) { return group.broadcast(tensors, options); });
  return on_mesh_device(call, std::move(out));
}

BackendWork scatter_from(const CollectiveCall& call, const at::Tensor& given, const at::Tensor& like, int64_t source) {
  const at::Tensor input = in_host_memory(call, given);
  const at::TensorOptions options_here = is_staged(call) ? like.options().device(at::kCPU) : like.options();
  BackendWork out{.works = {}, .output = at::empty(like.sizes(), options_here), .input = input};
  if (over_nccl(call) && call.n() > kMostGroupedOperations) {
    scatter_in_rounds(call, out.works, out.output, input, source);
    return out;
  }
  std::vector<at::Tensor> outputs = {as_bytes(out.output)};
  std::vector<std::vector<at::Tensor>> inputs;
  if (input.defined()) inputs.push_back(as_bytes(input).view({call.n(), -1}).unbind(0));
  auto options = options_for<c10d::ScatterOptions>(call);
  options.rootRank = source;
  start_one(call, out.works, [&](c10d::Backend& group) { return group.scatter(outputs, inputs, options); });
  return on_mesh_device(call, std::move(out));
}

BackendWork barrier_all(const CollectiveCall& call) {
  c10d::BarrierOptions options;
  if (!moves_host_memory(call)) {
    options.device = call.mesh.device();
    options.device_ids = {call.mesh.device().index()};  // by which NCCL's group finds the GPU
  }
  BackendWork out;
  start_one(call, out.works, [&](c10d::Backend& group) { return group.barrier(options); });
  return out;
}

}  // namespace tessera

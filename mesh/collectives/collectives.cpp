#include "tessera/mesh/collectives/collectives.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/collectives/backend_collectives.h"
#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/collectives/collective_frame.h"
#include "tessera/mesh/core/stream_point.h"
#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

using Call = CollectiveCall;
using Counts = std::vector<int64_t>;

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Returns `count` for each rank of the mesh dimension.
Counts even_counts(const Call& call, int64_t count) { return Counts(static_cast<std::size_t>(call.n()), count); }

bool same(const Counts& counts, int64_t count) {
  return std::ranges::all_of(counts, [&](int64_t each) { return each == count; });
}

// ---- helpers ------------------------------------------------------------------------------------------------------

// Returns a collective that needs no other rank. Its result may still be computed on this stream of a GPU when another
// stream asks for it.
PendingCollective without_sending(const Call& call, at::Tensor result) {
  const bool queues = call.wait_time == WaitTime::kLater && !call.mesh.world().is_fake();
  return PendingCollective(std::move(result), queues ? StreamPoint::here(call.mesh.device()) : StreamPoint());
}

at::Tensor gather_now(const Call& call, const at::Tensor& input) {
  check_tensor(call, input);
  Counts shape = {call.n()};
  shape.insert(shape.end(), input.sizes().begin(), input.sizes().end());
  if (call.n() == 1) return row_major(input.detach()).unsqueeze(0);
  if (input.numel() == 0) return input.new_empty(shape);
  return run_call(call.mesh, call.mesh_dim, [&] {
    return start_call(call, bytes_of(input), {.tensor = &input}, [&] { return gather_rows(call, row_major(input)); });
  });
}

PendingCollective start_reduce_parts(const Call& call, const at::Tensor& input, const Counts& counts,
                                     const Intent& intent, ReduceOp op) {
  return start_call(call, bytes_of(input), intent, [&] {
    const at::ScalarType dtype = input.scalar_type();
    const at::Tensor terms = to_reducible(row_major(input), op, call.kind);
    BackendWork out = reduce_parts(call, terms.dim() == 1 ? terms : terms.view({-1}), counts, op);
    if (needs_conversion(dtype, op))
      out.then([dtype, op](const at::Tensor& reduced) { return from_reducible(reduced, dtype, op); });
    return out;
  });
}

PendingCollective start_exchange(const char* kind, const at::Tensor& input, const Counts& send, const Counts& receive,
                                 const DeviceMesh& mesh, const MeshDim& mesh_dim, WaitTime wait_time) {
  const Call call = begin_call(kind, mesh, mesh_dim, wait_time);
  check_tensor(call, input);
  const auto bad = [](int64_t count) { return count < 0; };
  const int64_t sent = std::accumulate(send.begin(), send.end(), int64_t{0});
  const int64_t received = std::accumulate(receive.begin(), receive.end(), int64_t{0});
  if (static_cast<int64_t>(send.size()) != call.n() || static_cast<int64_t>(receive.size()) != call.n() ||
      std::any_of(send.begin(), send.end(), bad) || std::any_of(receive.begin(), receive.end(), bad) ||
      input.dim() != 1 || input.numel() != sent || (call.n() == 1 && sent != received)) {
    refuse_piece(
        call, fmt::format("input of shape ({}), send counts [{}] and receive counts [{}] do not fit {} ranks on mesh "
                          "dimension {}; give one count per rank, and a 1-D input whose size is the sum of the send "
                          "counts",
                          fmt::join(input.sizes(), ", "), fmt::join(send, ", "), fmt::join(receive, ", "), call.n(),
                          mesh.mesh_dim_name(call.mesh_dim)));
  }
  if (call.n() == 1) return without_sending(call, row_major(input.detach()));
  return start_call(call, bytes_of(input), {.tensor = &input, .send = &send, .receive = &receive},
                    [&] { return exchange(call, row_major(input), send, receive); });
}

}  // namespace

// ---- without waiting ----------------------------------------------------------------------------------------------

PendingCollective start_all_gather(const at::Tensor& input, const Counts& counts, const DeviceMesh& mesh,
                                   const MeshDim& mesh_dim, WaitTime wait_time) {
  const Call call = begin_call("all_gather", mesh, mesh_dim, wait_time);
  check_tensor(call, input);
  const int64_t sum = check_counts(call, counts);
  const int64_t mine = counts[call.here()];
  if (input.dim() != 1 || input.numel() != mine) {
    refuse_piece(call, fmt::format("input of shape ({}) where counts [{}] give this rank {}; pass it flat",
                                   fmt::join(input.sizes(), ", "), fmt::join(counts, ", "), mine));
  }
  if (call.n() == 1 || sum == 0) return without_sending(call, row_major(input.detach()));
  return start_call(call, bytes_of(input), {.tensor = &input, .counts = &counts},
                    [&] { return gather(call, row_major(input), counts); });
}

PendingCollective start_all_reduce(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim,
                                   ReduceOp op, bool owned, WaitTime wait_time) {
  const Call call = begin_call("all_reduce", mesh, mesh_dim, wait_time);
  check_tensor(call, input);
  const at::ScalarType dtype = input.scalar_type();
  reduced_as(dtype, op, call.kind);  // or throws, on every rank
  if (call.n() == 1) return without_sending(call, row_major(input.detach()));
  if (input.numel() == 0) return without_sending(call, input.new_empty(input.sizes()));
  return start_call(call, bytes_of(input), {.tensor = &input, .op = op}, [&] {
    const at::Tensor terms = to_reducible(row_major(input), op, call.kind);
    BackendWork out = reduce_all(call, terms, op, /*owned=*/owned || !terms.is_alias_of(input));
    if (needs_conversion(dtype, op))
      out.then([dtype, op](const at::Tensor& reduced) { return from_reducible(reduced, dtype, op); });
    return out;
  });
}

PendingCollective start_reduce_scatter(const at::Tensor& input, const Counts& counts, const DeviceMesh& mesh,
                                       const MeshDim& mesh_dim, ReduceOp op, WaitTime wait_time) {
  const Call call = begin_call("reduce_scatter", mesh, mesh_dim, wait_time);
  check_tensor(call, input);
  reduced_as(input.scalar_type(), op, call.kind);  // or throws, on every rank
  const int64_t sum = check_counts(call, counts);
  if (input.dim() != 1 || input.numel() != sum) {
    refuse_piece(call, fmt::format("input of shape ({}) where counts [{}] add up to {}; pass it flat",
                                   fmt::join(input.sizes(), ", "), fmt::join(counts, ", "), sum));
  }
  if (call.n() == 1 || sum == 0) return without_sending(call, row_major(input.detach()));
  const Intent intent{.tensor = &input, .op = op, .counts = same(counts, counts[0]) ? nullptr : &counts};
  return start_reduce_parts(call, input, counts, intent, op);
}

PendingCollective start_all_to_all(const at::Tensor& input, const Counts& send, const Counts& receive,
                                   const DeviceMesh& mesh, const MeshDim& mesh_dim, WaitTime wait_time) {
  return start_exchange("all_to_all", input, send, receive, mesh, mesh_dim, wait_time);
}

PendingCollective start_permute(const at::Tensor& input, const Counts& send, const Counts& receive,
                                const DeviceMesh& mesh, const MeshDim& mesh_dim, WaitTime wait_time) {
  return start_exchange("permute", input, send, receive, mesh, mesh_dim, wait_time);
}

// ---- waiting ------------------------------------------------------------------------------------------------------

at::Tensor all_gather(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim) {
  return gather_now(begin_call("all_gather", mesh, mesh_dim, WaitTime::kAtOnce), input);
}

at::Tensor all_gather(const at::Tensor& input, const Counts& counts, const DeviceMesh& mesh, const MeshDim& mesh_dim) {
  return run_call(mesh, mesh_dim, [&] { return start_all_gather(input, counts, mesh, mesh_dim, WaitTime::kAtOnce); });
}

at::Tensor all_reduce(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim, ReduceOp op) {
  return run_call(mesh, mesh_dim,
                  [&] { return start_all_reduce(input, mesh, mesh_dim, op, /*owned=*/false, WaitTime::kAtOnce); });
}

at::Tensor reduce_scatter(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim, ReduceOp op) {
  const Call call = begin_call("reduce_scatter", mesh, mesh_dim, WaitTime::kAtOnce);
  check_rows(call, input);
  reduced_as(input.scalar_type(), op, call.kind);  // or throws, on every rank
  if (call.n() == 1) return row_major(input.detach()).select(0, 0);
  const at::IntArrayRef row = input.sizes().slice(1);
  if (input.numel() == 0) return input.new_empty(row);
  return run_call(mesh, mesh_dim,
                  [&] {
                    return start_reduce_parts(call, input, even_counts(call, input.numel() / call.n()),
                                              {.tensor = &input, .op = op}, op);
                  })
      .view(row);
}

at::Tensor reduce_scatter(const at::Tensor& input, const Counts& counts, const DeviceMesh& mesh,
                          const MeshDim& mesh_dim, ReduceOp op) {
  return run_call(mesh, mesh_dim,
                  [&] { return start_reduce_scatter(input, counts, mesh, mesh_dim, op, WaitTime::kAtOnce); });
}

at::Tensor all_to_all(const at::Tensor& input, const Counts& send, const Counts& receive, const DeviceMesh& mesh,
                      const MeshDim& mesh_dim) {
  return run_call(mesh, mesh_dim,
                  [&] { return start_all_to_all(input, send, receive, mesh, mesh_dim, WaitTime::kAtOnce); });
}

at::Tensor permute(const at::Tensor& input, const Counts& send, const Counts& receive, const DeviceMesh& mesh,
                   const MeshDim& mesh_dim) {
  return run_call(mesh, mesh_dim,
                  [&] { return start_permute(input, send, receive, mesh, mesh_dim, WaitTime::kAtOnce); });
}

at::Tensor broadcast(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim, int64_t source) {
  const Call call = begin_call("broadcast", mesh, mesh_dim, WaitTime::kAtOnce);
  check_tensor(call, input);
  check_source(call, source);
  if (call.n() == 1) return row_major(input.detach());
  if (input.numel() == 0) return input.new_empty(input.sizes());
  const bool sends = mesh.local_rank(call.mesh_dim) == source;
  return run_call(mesh, mesh_dim, [&] {
    return start_call(call, sends ? bytes_of(input) : 0, {.tensor = &input, .source = source}, [&] {
      at::Tensor fresh = at::empty(input.sizes(), input.options());
      if (sends) fresh.copy_(input);
      return broadcast_from(call, fresh, source);
    });
  });
}

at::Tensor scatter(const at::Tensor& input, const at::Tensor& like, const DeviceMesh& mesh, const MeshDim& mesh_dim,
                   int64_t source) {
  const Call call = begin_call("scatter", mesh, mesh_dim, WaitTime::kAtOnce);
  check_tensor(call, like);
  check_source(call, source);
  const bool sends = mesh.local_rank(call.mesh_dim) == source;
  if (sends) check_scattered(call, input, like);
  if (call.n() == 1) return row_major(input.detach()).select(0, 0);
  if (like.numel() == 0) return like.new_empty(like.sizes());
  return run_call(mesh, mesh_dim, [&] {
    return start_call(call, sends ? bytes_of(input) : 0, {.tensor = &like, .source = source},
                      [&] { return scatter_from(call, sends ? row_major(input) : at::Tensor(), like, source); });
  });
}

void barrier(const DeviceMesh& mesh, const MeshDim& mesh_dim) {
  const Call call = begin_call("barrier", mesh, mesh_dim);
  if (call.n() == 1) return;
  run_call(mesh, mesh_dim, [&] { return start_call(call, 0, {}, [&] { return barrier_all(call); }); });
  mesh.world().check_alive();  // a barrier over NCCL that was aborted returns without an error
}

}  // namespace tessera

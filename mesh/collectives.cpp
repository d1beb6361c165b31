#include "tessera/mesh/collectives.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/checked.h"
#include "tessera/mesh/mismatch.h"
#include "tessera/mesh/wire.h"

namespace tessera {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// One collective: who calls what where. mesh_dim is in [0, ndim).
struct Call {
  const char* kind;
  const DeviceMesh& mesh;
  int64_t mesh_dim;
  int64_t n() const { return mesh.size(mesh_dim); }
};

Call begin(const char* kind, const DeviceMesh& mesh, int64_t mesh_dim) {
  if (!mesh.is_member()) {
    throw std::invalid_argument(fmt::format("{}: rank {} is outside mesh {} and must not call it; ask is_member() first",
                                            kind, mesh.world().rank(), mesh.to_string()));
  }
  return {.kind = kind, .mesh = mesh, .mesh_dim = mesh.mesh().normalize(mesh_dim)};
}

// True of a DTensor, which the layers above make: what it stands for lies in other tensors.
bool lacks_data(const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.has_storage(); }

std::string no_data(const char* kind) {
  return fmt::format(
      "{}: the tensor has no data of its own; a DTensor communicates by redistribute() or full_tensor(), and "
      "its to_local() is a tensor to pass here",
      kind);
}

void check_tensor(const Call& call, const at::Tensor& tensor) {
  if (!tensor.defined()) throw std::invalid_argument(fmt::format("{}: the tensor is undefined", call.kind));
  if (lacks_data(tensor)) throw std::invalid_argument(no_data(call.kind));
  if (tensor.device().type() != call.mesh.device_type() || tensor.layout() != at::kStrided) {
    throw std::invalid_argument(fmt::format("{}: a {} tensor on {} cannot travel on mesh {}; move it with to(mesh.device())",
                                            call.kind, tensor.layout() == at::kStrided ? "dense" : "sparse",
                                            tensor.device().str(), call.mesh.to_string()));
  }
}

void check_rows(const Call& call, const at::Tensor& input) {
  check_tensor(call, input);
  if (input.dim() >= 1 && input.size(0) == call.n()) return;
  throw std::invalid_argument(fmt::format("{}: input of shape ({}) needs {} rows, one for each rank of mesh dimension {}",
                                          call.kind, fmt::join(input.sizes(), ", "), call.n(),
                                          call.mesh.mesh_dim_name(call.mesh_dim)));
}

void check_source(const Call& call, int64_t source) {
  if (source >= 0 && source < call.n()) return;
  throw std::invalid_argument(
      fmt::format("{}: source {} is outside [0, {}) on mesh dimension {}; pass the coordinate there, not the global rank",
                  call.kind, source, call.n(), call.mesh.mesh_dim_name(call.mesh_dim)));
}

// The sum of one count a rank, each of at least 0.
int64_t check_counts(const Call& call, const std::vector<int64_t>& counts) {
  if (static_cast<int64_t>(counts.size()) == call.n() && std::ranges::none_of(counts, [](int64_t n) { return n < 0; })) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }
  throw std::invalid_argument(fmt::format("{}: counts [{}] for {} ranks on mesh dimension {}; give each one of at least 0",
                                          call.kind, fmt::join(counts, ", "), call.n(),
                                          call.mesh.mesh_dim_name(call.mesh_dim)));
}

// Only the source sees a wrong input: the others would wait for it, so the job is failed.
void check_scattered(const Call& call, const at::Tensor& input, const at::Tensor& like) {
  const bool empty_handed = input.defined() && lacks_data(input);
  const bool fits = input.defined() && !empty_handed && input.dim() == like.dim() + 1 && input.size(0) == call.n() &&
                    input.sizes().slice(1) == like.sizes() && input.scalar_type() == like.scalar_type() &&
                    input.device() == like.device();
  if (fits) return;
  const std::string text =
      empty_handed
          ? no_data("scatter")
          : fmt::format("scatter: the source's input of shape ({}) must be {} rows of shape ({}), of dtype and device {}",
                        input.defined() ? fmt::format("{}", fmt::join(input.sizes(), ", ")) : "undefined", call.n(),
                        fmt::join(like.sizes(), ", "), like.toString());
  call.mesh.world().fail("scatter", text);
  throw std::invalid_argument(text);
}

// "aten::mm: all_reduce on mesh dimension tp of {dp: 2, tp: 2} on cpu"
std::string where(const Call& call) {
  const char* const op = call.mesh.world().current_op();
  return fmt::format("{}{}{} on mesh dimension {} of {}", op, *op == '\0' ? "" : ": ", call.kind,
                     call.mesh.mesh_dim_name(call.mesh_dim), call.mesh.to_string());
}

std::string text_of(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

void report(const Call& call, int64_t bytes) {
  World& world = call.mesh.world();
  if (spdlog::should_log(spdlog::level::debug)) {
    spdlog::debug("rank {}: {}, {} bytes", world.rank(), where(call), bytes);
  }
  if (!world.observed() || world.check_state().inside) return;
  world.record({.kind = call.kind,
                .mesh_dim = call.mesh.mesh_dim_name(call.mesh_dim),
                .bytes = bytes,
                .op = world.current_op(),
                .path = world.current_path()});
}

// Runs `start`, which adds to the works, on the group and waits for all. A failure there becomes the job's.
template <typename Start>
void wait_for_all(const Call& call, const Start& start) {
  const auto group = call.mesh.group(call.mesh_dim);
  std::vector<Work> works;
  try {
    start(*group, works);
    for (const Work& work : works) work->wait();
  } catch (const MismatchError&) {
    throw;  // every rank has it: nobody was lost
  } catch (const std::exception& error) {
    call.mesh.world().rethrow_collective_failure(where(call), call.mesh.group_ranks(call.mesh_dim), text_of(error));
  }
}

// The same of the one that `start` returns.
template <typename Start>
void wait_for(const Call& call, const Start& start) {
  wait_for_all(call, [&](c10d::Backend& group, std::vector<Work>& works) { works.push_back(start(group)); });
}

// Under Checked: the ranks of the group compare what they are about to do.
void check(const Call& call, const Intent& intent);

// The frame of every collective: one thread at a time, in a world that is alive, recorded, checked, below autograd. What goes wrong
// here on one rank alone, such as memory, would leave the others waiting: it is failed().
template <typename Body>
auto communicate(const Call& call, int64_t bytes, const Intent& intent, const Body& body) {
  World& world = call.mesh.world();
  const World::Exclusive exclusive(world);
  world.check_alive();
  report(call, bytes);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(call, intent);
  try {
    return body();
  } catch (const std::exception& error) {
    world.fail(where(call), text_of(error));
    throw;
  }
}

at::Tensor contiguous(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg().contiguous(); }

std::vector<int64_t> with_rows(int64_t n, at::IntArrayRef sizes) {
  std::vector<int64_t> shape = {n};
  shape.insert(shape.end(), sizes.begin(), sizes.end());
  return shape;
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

c10d::ReduceOp::RedOpType backend_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:  // divided here: not every backend divides every dtype
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kBitAnd: return c10d::ReduceOp::BAND;
    case ReduceOp::kBitOr: return c10d::ReduceOp::BOR;
    case ReduceOp::kBitXor: return c10d::ReduceOp::BXOR;
  }
  throw std::logic_error("backend_op: not a ReduceOp");
}

// Reductions that no backend carries out, so that the terms are brought together and reduced here: products of complex numbers,
// and bits on CUDA.
bool reduces_here_alone(const DeviceMesh& mesh, const at::Tensor& wire, ReduceOp op) {
  return (wire.is_complex() && op == ReduceOp::kProduct) || (is_bitwise(op) && mesh.device_type() != c10::DeviceType::CPU);
}

// Exchanges flat tensors; counts in elements.
void exchange(const Call& call, const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> send,
              std::vector<int64_t> receive) {
  const int64_t width = input.element_size();
  for (int64_t& count : send) count *= width;
  for (int64_t& count : receive) count *= width;
  at::Tensor to = as_bytes(output);
  at::Tensor from = as_bytes(input);
  wait_for(call, [&](c10d::Backend& group) { return group.alltoall_base(to, from, receive, send); });
}

// Of CPU tensors: MPI and the in-memory group have collectives of their own that are as fast as messages.
bool over_gloo(const Call& call) {
  return call.mesh.device_type() == c10::DeviceType::CPU && call.mesh.group(call.mesh_dim)->getBackendName() == "gloo";
}

// Gloo gathers in a ring of n - 1 steps, and copies: all at once is 1.2 to 2.4 times faster (2 and 4 ranks) until bandwidth
// counts, and messages between each two 1.2 to 4 times where it does.
constexpr int64_t kGatherAtOnce = 256 << 10;  // bytes of the result

// Every rank's piece to every other by messages of their own, from and to where they stand.
void gather_by_messages(const Call& call, const std::vector<at::Tensor>& slots, const at::Tensor& mine) {
  constexpr int kTag = 0;
  const int64_t me = call.mesh.local_rank(call.mesh_dim);
  const auto peer = [&](int64_t distance) { return (me + distance) % call.n(); };
  wait_for_all(call, [&](c10d::Backend& group, std::vector<Work>& works) {
    for (int64_t i = 1; i < call.n(); ++i) {
      std::vector<at::Tensor> slot = {slots[static_cast<std::size_t>(peer(call.n() - i))]};
      if (slot[0].numel() > 0) works.push_back(group.recv(slot, static_cast<int>(peer(call.n() - i)), kTag));
    }
    std::vector<at::Tensor> piece = {mine};
    for (int64_t i = 1; i < call.n() && mine.numel() > 0; ++i) {
      works.push_back(group.send(piece, static_cast<int>(peer(i)), kTag));
    }
    slots[static_cast<std::size_t>(me)].copy_(mine);
  });
}

// Flat bytes: counts[c] of coordinate c.
void gather_bytes(const Call& call, at::Tensor to, at::Tensor from, const std::vector<int64_t>& counts) {
  const bool even = std::ranges::all_of(counts, [&](int64_t count) { return count == counts[0]; });
  const bool cpu = call.mesh.device_type() == c10::DeviceType::CPU;
  const bool gloo = over_gloo(call);
  if (gloo && to.numel() > kGatherAtOnce) {
    gather_by_messages(call, to.split_with_sizes(counts), from);
  } else if (gloo || (cpu && !even)) {
    exchange(call, to, from.repeat({call.n()}), std::vector<int64_t>(counts.size(), from.numel()), counts);
  } else if (even) {
    wait_for(call, [&](c10d::Backend& group) { return group._allgather_base(to, from); });
  } else {
    std::vector<std::vector<at::Tensor>> slots = {to.split_with_sizes(counts)};
    std::vector<at::Tensor> pieces = {from};
    wait_for(call, [&](c10d::Backend& group) { return group.allgather(slots, pieces); });
  }
}

at::Tensor gather_rows(const Call& call, const at::Tensor& input) {
  at::Tensor output = at::empty(with_rows(call.n(), input.sizes()), input.options());
  const at::Tensor from = as_bytes(contiguous(input));
  gather_bytes(call, as_bytes(output), from, std::vector<int64_t>(static_cast<std::size_t>(call.n()), from.numel()));
  return output;
}

void check(const Call& call, const Intent& intent) {
  if (!Checked::enabled(call.mesh.world())) return;
  check_collective(call.kind, call.mesh, call.mesh_dim, intent,
                   [&](const at::Tensor& row) { return gather_rows(call, row.to(call.mesh.device())).cpu(); });
}

// All-reduce in place of a fresh contiguous tensor of a dtype from reduced_as(), complex as pairs of reals.
void all_reduce_in_place(const Call& call, const at::Tensor& fresh, ReduceOp op) {
  std::vector<at::Tensor> tensors = {fresh.is_complex() ? at::view_as_real(fresh) : fresh};
  c10d::AllreduceOptions options;
  options.reduceOp = backend_op(op);
  wait_for(call, [&](c10d::Backend& group) { return group.allreduce(tensors, options); });
  if (op == ReduceOp::kAvg) tensors[0].div_(call.n());
}

// Each rank sends counts[i] elements of flat `wire` to coordinate i and adds up what it gets in the order of coordinates, in one
// pass: Gloo's own reduce-scatter is an all-reduce inside, 1.9 to 4.2 times slower (2 and 4 ranks, 64 B to 16 MiB).
at::Tensor reduce_by_exchange(const Call& call, const at::Tensor& wire, const std::vector<int64_t>& counts, ReduceOp op) {
  const int64_t mine = counts[static_cast<std::size_t>(call.mesh.local_rank(call.mesh_dim))];
  const at::Tensor received = at::empty({call.n(), mine}, wire.options());
  exchange(call, received.view({-1}), wire, counts, std::vector<int64_t>(counts.size(), mine));
  return reduce_rows(received, op);
}

// [n, *] -> [*].
at::Tensor reduce_rows_by_exchange(const Call& call, const at::Tensor& wire, ReduceOp op) {
  const std::vector<int64_t> counts(static_cast<std::size_t>(call.n()), wire.numel() / call.n());
  return reduce_by_exchange(call, wire.view({-1}), counts, op).view(wire.sizes().slice(1));
}

at::Tensor reduce_scatter_by_backend(const Call& call, const at::Tensor& wire, ReduceOp op) {
  at::Tensor output = at::empty(wire.sizes().slice(1), wire.options());
  const auto flat = [](const at::Tensor& tensor) {
    return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor.view({-1});
  };
  at::Tensor to = flat(output);
  at::Tensor from = flat(wire);
  c10d::ReduceScatterOptions options;
  options.reduceOp = backend_op(op);
  wait_for(call, [&](c10d::Backend& group) { return group._reduce_scatter_base(to, from, options); });
  if (op == ReduceOp::kAvg) output.div_(call.n());
  return output;
}

}  // namespace

at::Tensor all_gather(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim) {
  const Call call = begin("all_gather", mesh, mesh_dim);
  check_tensor(call, input);
  if (call.n() == 1) return contiguous(input).unsqueeze(0);
  if (input.numel() == 0) return at::empty(with_rows(call.n(), input.sizes()), input.options());
  return communicate(call, bytes_of(input), {.tensor = &input}, [&] { return gather_rows(call, input); });
}

at::Tensor all_gather(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                      int64_t mesh_dim) {
  const Call call = begin("all_gather", mesh, mesh_dim);
  check_tensor(call, input);
  const int64_t sum = check_counts(call, counts);
  const int64_t mine = counts[static_cast<std::size_t>(mesh.local_rank(call.mesh_dim))];
  if (input.dim() != 1 || input.numel() != mine) {
    throw std::invalid_argument(
        fmt::format("all_gather: input of shape ({}) where counts [{}] give this rank {}; pass it flat",
                    fmt::join(input.sizes(), ", "), fmt::join(counts, ", "), mine));
  }
  if (call.n() == 1 || sum == 0) return contiguous(input);
  return communicate(call, bytes_of(input), {.tensor = &input, .counts = &counts}, [&] {
    at::Tensor output = at::empty({sum}, input.options());
    std::vector<int64_t> bytes = counts;
    for (int64_t& count : bytes) count *= input.element_size();
    gather_bytes(call, as_bytes(output), as_bytes(contiguous(input)), bytes);
    return output;
  });
}

at::Tensor all_reduce(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim, ReduceOp op) {
  const Call call = begin("all_reduce", mesh, mesh_dim);
  check_tensor(call, input);
  const at::ScalarType dtype = input.scalar_type();
  reduced_as(dtype, op, call.kind);  // or throws, on every rank
  if (call.n() == 1) return contiguous(input);
  if (input.numel() == 0) return at::empty(input.sizes(), input.options());
  return communicate(call, bytes_of(input), {.tensor = &input, .op = op}, [&] {
    at::Tensor wire = to_wire(contiguous(input), op, call.kind);
    if (reduces_here_alone(mesh, wire, op)) return from_wire(reduce_rows(gather_rows(call, wire), op), dtype, op);
    if (wire.is_alias_of(input)) wire = wire.clone();
    all_reduce_in_place(call, wire, op);
    return from_wire(wire, dtype, op);
  });
}

at::Tensor reduce_scatter(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim, ReduceOp op) {
  const Call call = begin("reduce_scatter", mesh, mesh_dim);
  check_rows(call, input);
  const at::ScalarType dtype = input.scalar_type();
  reduced_as(dtype, op, call.kind);  // or throws, on every rank
  if (call.n() == 1) return contiguous(input).select(0, 0);
  if (input.numel() == 0) return at::empty(input.sizes().slice(1), input.options());
  return communicate(call, bytes_of(input), {.tensor = &input, .op = op}, [&] {
    const at::Tensor wire = to_wire(contiguous(input), op, call.kind);
    const bool exchange_rows = over_gloo(call) || reduces_here_alone(mesh, wire, op);
    const at::Tensor reduced =
        exchange_rows ? reduce_rows_by_exchange(call, wire, op) : reduce_scatter_by_backend(call, wire, op);
    return from_wire(reduced, dtype, op);
  });
}

at::Tensor reduce_scatter(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                          int64_t mesh_dim, ReduceOp op) {
  const Call call = begin("reduce_scatter", mesh, mesh_dim);
  check_tensor(call, input);
  const at::ScalarType dtype = input.scalar_type();
  reduced_as(dtype, op, call.kind);  // or throws, on every rank
  const int64_t sum = check_counts(call, counts);
  if (input.dim() != 1 || input.numel() != sum) {
    throw std::invalid_argument(
        fmt::format("reduce_scatter: input of shape ({}) where counts [{}] add up to {}; pass it flat",
                    fmt::join(input.sizes(), ", "), fmt::join(counts, ", "), sum));
  }
  if (call.n() == 1 || sum == 0) return contiguous(input);
  const bool even = std::ranges::all_of(counts, [&](int64_t count) { return count == counts[0]; });
  if (even) return reduce_scatter(input.view({call.n(), counts[0]}), mesh, mesh_dim, op);
  return communicate(call, bytes_of(input), {.tensor = &input, .op = op, .counts = &counts}, [&] {
    return from_wire(reduce_by_exchange(call, to_wire(contiguous(input), op, call.kind), counts, op), dtype, op);
  });
}

namespace {

at::Tensor exchange_uneven(const char* kind, const at::Tensor& input, const std::vector<int64_t>& send,
                           const std::vector<int64_t>& receive, const DeviceMesh& mesh, int64_t mesh_dim) {
  const Call call = begin(kind, mesh, mesh_dim);
  check_tensor(call, input);
  const auto bad = [](int64_t count) { return count < 0; };
  const int64_t sent = std::accumulate(send.begin(), send.end(), int64_t{0});
  const int64_t received = std::accumulate(receive.begin(), receive.end(), int64_t{0});
  if (static_cast<int64_t>(send.size()) != call.n() || static_cast<int64_t>(receive.size()) != call.n() ||
      std::any_of(send.begin(), send.end(), bad) || std::any_of(receive.begin(), receive.end(), bad) || input.dim() != 1 ||
      input.numel() != sent || (call.n() == 1 && sent != received)) {
    throw std::invalid_argument(
        fmt::format("{}: input of shape ({}), send counts [{}] and receive counts [{}] do not fit {} ranks on mesh "
                    "dimension {}; "
                    "give one count a rank, and a 1-D input of the sum of the send counts",
                    kind, fmt::join(input.sizes(), ", "), fmt::join(send, ", "), fmt::join(receive, ", "), call.n(),
                    mesh.mesh_dim_name(call.mesh_dim)));
  }
  if (call.n() == 1) return contiguous(input);
  return communicate(call, bytes_of(input), {.tensor = &input, .send = &send, .receive = &receive}, [&] {
    at::Tensor output = at::empty({received}, input.options());
    exchange(call, output, contiguous(input), send, receive);
    return output;
  });
}

}  // namespace

at::Tensor all_to_all(const at::Tensor& input, const std::vector<int64_t>& send, const std::vector<int64_t>& receive,
                      const DeviceMesh& mesh, int64_t mesh_dim) {
  return exchange_uneven("all_to_all", input, send, receive, mesh, mesh_dim);
}

at::Tensor permute(const at::Tensor& input, const std::vector<int64_t>& send, const std::vector<int64_t>& receive,
                   const DeviceMesh& mesh, int64_t mesh_dim) {
  return exchange_uneven("permute", input, send, receive, mesh, mesh_dim);
}

at::Tensor broadcast(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim, int64_t source) {
  const Call call = begin("broadcast", mesh, mesh_dim);
  check_tensor(call, input);
  check_source(call, source);
  if (call.n() == 1) return contiguous(input);
  if (input.numel() == 0) return at::empty(input.sizes(), input.options());
  const bool sends = mesh.local_rank(call.mesh_dim) == source;
  return communicate(call, sends ? bytes_of(input) : 0, {.tensor = &input, .source = source}, [&] {
    at::Tensor output = at::empty(input.sizes(), input.options());
    if (sends) output.copy_(input);
    std::vector<at::Tensor> tensors = {as_bytes(output)};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    wait_for(call, [&](c10d::Backend& group) { return group.broadcast(tensors, options); });
    return output;
  });
}

at::Tensor scatter(const at::Tensor& input, const at::Tensor& like, const DeviceMesh& mesh, int64_t mesh_dim,
                   int64_t source) {
  const Call call = begin("scatter", mesh, mesh_dim);
  check_tensor(call, like);
  check_source(call, source);
  const bool sends = mesh.local_rank(call.mesh_dim) == source;
  if (sends) check_scattered(call, input, like);
  if (call.n() == 1) return contiguous(input).select(0, 0);
  if (like.numel() == 0) return at::empty(like.sizes(), like.options());
  return communicate(call, sends ? bytes_of(input) : 0, {.tensor = &like, .source = source}, [&] {
    at::Tensor output = at::empty(like.sizes(), like.options());
    std::vector<at::Tensor> outputs = {as_bytes(output)};
    std::vector<std::vector<at::Tensor>> inputs;
    if (sends) inputs.push_back(as_bytes(contiguous(input)).view({call.n(), -1}).unbind(0));
    c10d::ScatterOptions options;
    options.rootRank = source;
    wait_for(call, [&](c10d::Backend& group) { return group.scatter(outputs, inputs, options); });
    return output;
  });
}

void barrier(const DeviceMesh& mesh, int64_t mesh_dim) {
  const Call call = begin("barrier", mesh, mesh_dim);
  if (call.n() == 1) return;
  communicate(call, 0, {}, [&] {
    c10d::BarrierOptions options;
    if (mesh.device_type() == c10::DeviceType::CUDA) options.device = mesh.device();
    wait_for(call, [&](c10d::Backend& group) { return group.barrier(options); });
  });
}

}  // namespace tessera

#include "tessera/mesh/collective_call.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/deferred_tensor.h"
#include "tessera/mesh/group_moves.h"
#include "tessera/mesh/mismatch.h"

namespace tessera {
namespace {

// True of a DTensor, which the layers above make: what it stands for lies in other tensors.
bool lacks_data(const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.has_storage(); }

std::string no_data(const char* kind) {
  return fmt::format(
      "{}: the tensor has no data of its own; a DTensor communicates by redistribute() or full_tensor(), and "
      "its to_local() is a tensor to pass here",
      kind);
}

// "aten::mm: all_reduce on mesh dimension tp of {dp: 2, tp: 2} on cpu"
std::string where(const CollectiveCall& call, const char* op) {
  return fmt::format("{}{}{} on mesh dimension {} of {}", op, *op == '\0' ? "" : ": ", call.kind,
                     call.mesh.mesh_dim_name(call.mesh_dim), call.mesh.to_string());
}
std::string where(const CollectiveCall& call) { return where(call, call.mesh.world().current_op()); }

std::string text_of(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

void report(const CollectiveCall& call, int64_t bytes) {
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

// Runs `body`; what it throws fails the world, for the others may wait for this rank.
template <typename Body>
auto failing(const CollectiveCall& call, const char* op, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    call.mesh.world().fail(where(call, op), text_of(error));
    throw;
  }
}

}  // namespace

const c10::intrusive_ptr<c10d::Backend>& CollectiveCall::group() const {
  if (!backend) backend = mesh.group(mesh_dim);
  return backend;
}

CollectiveCall begin_call(const char* kind, const DeviceMesh& mesh, int64_t mesh_dim) {
  if (!mesh.is_member()) {
    throw std::invalid_argument(fmt::format("{}: rank {} is outside mesh {} and must not call it; ask is_member() first",
                                            kind, mesh.world().rank(), mesh.to_string()));
  }
  return {.kind = kind, .mesh = mesh, .mesh_dim = mesh.mesh().normalize(mesh_dim)};
}

// ---- arguments --------------------------------------------------------------------------------------------------------

void check_tensor(const CollectiveCall& call, const at::Tensor& tensor) {
  if (!tensor.defined()) throw std::invalid_argument(fmt::format("{}: the tensor is undefined", call.kind));
  detail::refuse_deferred(call.kind, tensor);
  if (lacks_data(tensor)) throw std::invalid_argument(no_data(call.kind));
  if (tensor.device().type() != call.mesh.device_type() || tensor.layout() != at::kStrided) {
    throw std::invalid_argument(fmt::format("{}: a {} tensor on {} cannot travel on mesh {}; move it with to(mesh.device())",
                                            call.kind, tensor.layout() == at::kStrided ? "dense" : "sparse",
                                            tensor.device().str(), call.mesh.to_string()));
  }
}

void check_rows(const CollectiveCall& call, const at::Tensor& input) {
  check_tensor(call, input);
  if (input.dim() >= 1 && input.size(0) == call.n()) return;
  throw std::invalid_argument(fmt::format("{}: input of shape ({}) needs {} rows, one for each rank of mesh dimension {}",
                                          call.kind, fmt::join(input.sizes(), ", "), call.n(),
                                          call.mesh.mesh_dim_name(call.mesh_dim)));
}

void check_source(const CollectiveCall& call, int64_t source) {
  if (source >= 0 && source < call.n()) return;
  throw std::invalid_argument(
      fmt::format("{}: source {} is outside [0, {}) on mesh dimension {}; pass the coordinate there, not the global rank",
                  call.kind, source, call.n(), call.mesh.mesh_dim_name(call.mesh_dim)));
}

int64_t check_counts(const CollectiveCall& call, const std::vector<int64_t>& counts) {
  if (static_cast<int64_t>(counts.size()) == call.n() && std::ranges::none_of(counts, [](int64_t n) { return n < 0; })) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }
  throw std::invalid_argument(fmt::format("{}: counts [{}] for {} ranks on mesh dimension {}; give each one of at least 0",
                                          call.kind, fmt::join(counts, ", "), call.n(),
                                          call.mesh.mesh_dim_name(call.mesh_dim)));
}

void check_scattered(const CollectiveCall& call, const at::Tensor& input, const at::Tensor& like) {
  const bool empty_handed = input.defined() && lacks_data(input);
  const bool fits = input.defined() && !empty_handed && !detail::is_deferred(input) && input.dim() == like.dim() + 1 &&
                    input.size(0) == call.n() && input.sizes().slice(1) == like.sizes() &&
                    input.scalar_type() == like.scalar_type() && input.device() == like.device();
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

// ---- running ----------------------------------------------------------------------------------------------------------

void Underway::then(Step next) {
  if (!rest) {
    rest = std::move(next);
  } else {
    rest = [first = std::move(rest), next = std::move(next)](at::Tensor output) { return next(first(std::move(output))); };
  }
}

struct Started::Work {
  CollectiveCall call;
  std::string op;  // that started it
  Underway underway;

  void wait() const {
    try {
      for (const auto& work : underway.works) work->wait();
    } catch (const MismatchError&) {
      throw;  // every rank has it: nobody was lost
    } catch (const std::exception& error) {
      call.mesh.world().rethrow_collective_failure(where(call, op.c_str()), call.mesh.group_ranks(call.mesh_dim), error);
    }
  }
};

namespace {

// Under Checked: the ranks of the group compare what they are about to do.
void check(const CollectiveCall& call, const Intent& intent) {
  if (!Checked::enabled(call.mesh.world())) return;
  check_collective(call.kind, call.mesh, call.mesh_dim, intent, [&](const at::Tensor& row) {
    Started::Work gathered{
        .call = call, .op = call.mesh.world().current_op(), .underway = gather_rows(call, row.to(call.mesh.device()))};
    gathered.wait();
    return gathered.underway.result().cpu();
  });
}

}  // namespace

Started::Started(at::Tensor result) : result_(std::move(result)) {}
Started::Started(std::unique_ptr<Work> work) : work_(std::move(work)) {}
Started::Started(Started&&) noexcept = default;

Started::~Started() {
  if (!work_) return;
  try {
    for (const auto& work : work_->underway.works) work->wait();
  } catch (const std::exception& error) {
    spdlog::debug("a collective that nobody waited for: {}", text_of(error));
  }
}

at::Tensor Started::wait() {
  if (!work_) {
    if (!result_.defined()) throw std::logic_error("Started::wait: it has been waited for");
    return std::exchange(result_, at::Tensor());
  }
  const World::Exclusive exclusive(work_->call.mesh.world());
  const detail::NotRecording own_tensors;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unique_ptr<Work> work = std::move(work_);
  return failing(work->call, work->op.c_str(), [&] {
    work->wait();
    return work->underway.result();
  });
}

void start_on_group(const CollectiveCall& call, c10::function_ref<void(c10d::Backend&)> start) {
  c10d::Backend& group = *call.group();
  try {
    start(group);
  } catch (const MismatchError&) {
    throw;
  } catch (const std::exception& error) {
    call.mesh.world().rethrow_collective_failure(where(call), call.mesh.group_ranks(call.mesh_dim), error);
  }
}

Started start_call(const CollectiveCall& call, int64_t bytes, const Intent& intent, c10::function_ref<Underway()> begin) {
  World& world = call.mesh.world();
  const World::Exclusive exclusive(world);
  const detail::NotRecording own_tensors;
  world.check_alive();
  report(call, bytes);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(call, intent);
  Underway underway = failing(call, world.current_op(), begin);
  return Started(std::make_unique<Started::Work>(
      Started::Work{.call = call, .op = world.current_op(), .underway = std::move(underway)}));
}

at::Tensor run_call(const DeviceMesh& mesh, int64_t mesh_dim, c10::function_ref<Started()> start) {
  std::optional<World::Exclusive> exclusive;
  if (mesh.is_member() && mesh.size(mesh_dim) > 1) exclusive.emplace(mesh.world());
  return start().wait();
}

}  // namespace tessera

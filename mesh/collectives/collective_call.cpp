#include "tessera/mesh/collectives/collective_call.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera {
namespace {

// Returns whether `tensor` has no storage, as a DTensor: its values are in local tensors.
bool has_no_data(const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.has_storage(); }

std::string no_data(const char* kind) {
  return fmt::format(
      "{}: the tensor has no data of its own; a DTensor communicates by redistribute() or full_tensor(), and "
      "its to_local() is a tensor to pass here",
      kind);
}

}  // namespace

std::string CollectiveCall::text(const char* op) const {
  return fmt::format("{}{}{} on mesh dimension {} of {}", op, *op == '\0' ? "" : ": ", kind,
                     mesh.mesh_dim_name(mesh_dim), mesh.to_string());
}

const c10::intrusive_ptr<c10d::Backend>& CollectiveCall::group() const {
  if (!backend) backend = mesh.group(mesh_dim);
  return backend;
}

CollectiveCall begin_call(const char* kind, const DeviceMesh& mesh, const MeshDim& mesh_dim, WaitTime wait_time) {
  if (!mesh.is_member()) {
    throw std::invalid_argument(
        fmt::format("{}: rank {} is outside mesh {} and must not call it; ask is_member() first", kind,
                    mesh.world().rank(), mesh.to_string()));
  }
  return {.kind = kind, .mesh = mesh, .mesh_dim = mesh.mesh().index_of(mesh_dim), .wait_time = wait_time};
}

// ---- arguments ----------------------------------------------------------------------------------------------------

void check_tensor(const CollectiveCall& call, const at::Tensor& tensor) {
  if (!tensor.defined()) throw std::invalid_argument(fmt::format("{}: the tensor is undefined", call.kind));
  detail::refuse_deferred(call.kind, tensor);
  if (has_no_data(tensor)) throw std::invalid_argument(no_data(call.kind));
  const bool is_dense = tensor.layout() == at::kStrided;
  if (!is_on_device(tensor, call.mesh) || !is_dense) {
    throw std::invalid_argument(
        fmt::format("{}: a {} tensor on {} cannot be sent on mesh {}; {}", call.kind, is_dense ? "dense" : "sparse",
                    tensor.device().str(), call.mesh.to_string(),
                    is_dense ? "move it with to(mesh.device())" : "give a dense one, to_dense()"));
  }
  if (tensor.is_quantized()) {
    throw std::invalid_argument(
        fmt::format("{}: a quantized tensor of {} cannot be sent; send its int_repr(), or dequantize it first",
                    call.kind, c10::toString(tensor.scalar_type())));
  }
}

void check_rows(const CollectiveCall& call, const at::Tensor& input) {
  check_tensor(call, input);
  if (input.dim() >= 1 && input.size(0) == call.n()) return;
  throw std::invalid_argument(
      fmt::format("{}: input of shape ({}) needs {} rows, one for each rank of mesh dimension {}", call.kind,
                  fmt::join(input.sizes(), ", "), call.n(), call.mesh.mesh_dim_name(call.mesh_dim)));
}

void check_source(const CollectiveCall& call, int64_t source) {
  if (source >= 0 && source < call.n()) return;
  throw std::invalid_argument(fmt::format(
      "{}: source {} is outside [0, {}) on mesh dimension {}; pass the coordinate there, not the global rank",
      call.kind, source, call.n(), call.mesh.mesh_dim_name(call.mesh_dim)));
}

int64_t check_counts(const CollectiveCall& call, const std::vector<int64_t>& counts) {
  if (static_cast<int64_t>(counts.size()) == call.n() &&
      std::ranges::none_of(counts, [](int64_t n) { return n < 0; })) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }
  refuse_piece(call, fmt::format("counts [{}] for {} ranks on mesh dimension {}; give each one of at least 0",
                                 fmt::join(counts, ", "), call.n(), call.mesh.mesh_dim_name(call.mesh_dim)));
}

void refuse_piece(const CollectiveCall& call, const std::string& why) {
  const std::string text = fmt::format("{}: {}", call.kind, why);
  if (call.n() > 1) call.mesh.world().fail(call.kind, text);
  throw std::invalid_argument(text);
}

void check_scattered(const CollectiveCall& call, const at::Tensor& input, const at::Tensor& like) {
  const bool empty_handed = input.defined() && has_no_data(input);
  const bool fits = input.defined() && !empty_handed && !detail::is_deferred(input) && input.dim() == like.dim() + 1 &&
                    input.size(0) == call.n() && input.sizes().slice(1) == like.sizes() &&
                    input.scalar_type() == like.scalar_type() && input.device() == like.device();
  if (fits) return;
  const std::string text =
      empty_handed
          ? no_data("scatter")
          : fmt::format(
                "scatter: the source's input of shape ({}) must be {} rows of shape ({}), of dtype and device {}",
                input.defined() ? fmt::format("{}", fmt::join(input.sizes(), ", ")) : "undefined", call.n(),
                fmt::join(like.sizes(), ", "), like.toString());
  if (call.n() > 1) call.mesh.world().fail("scatter", text);  // the others wait for this rank
  throw std::invalid_argument(text);
}

// ---- running ------------------------------------------------------------------------------------------------------

void BackendWork::then(Step next) {
  if (!rest) {
    rest = std::move(next);
  } else {
    rest = [first = std::move(rest), next = std::move(next)](at::Tensor output) {
      return next(first(std::move(output)));
    };
  }
}

void start_on_group(const CollectiveCall& call, c10::function_ref<void(c10d::Backend&)> start) {
  c10d::Backend& group = *call.group();
  try {
    start(group);
  } catch (const MismatchError&) {
    throw;
  } catch (const std::exception& error) {
    call.mesh.world().rethrow_collective_failure(call.text(call.mesh.world().current_op()),
                                                 call.mesh.group_ranks(call.mesh_dim), error);
  }
}

}  // namespace tessera

#include "tessera/dtensor/dtensor.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/core/backward_pass.h"
#include "tessera/mesh/core/deferred_tensor.h"

namespace tessera {
at::Tensor detail::as_dtensor(const at::Tensor& gradient, const Spec& like) {
  if (detail::is_dtensor(gradient)) return gradient;
  if ((c10::GradMode::is_enabled() && gradient.requires_grad()) || detail::has_tangent(gradient)) {
    return from_local(gradient, like.mesh, Placements(static_cast<std::size_t>(like.mesh.ndim()), Replicate()));
  }
  return detail::wrap(gradient, replicated_spec(like.mesh, gradient));
}

bool detail::is_shared(const at::Tensor& gradient) {
  return !c10::GradMode::is_enabled() && (gradient.use_count() > 1 || shares_memory(gradient));
}

bool is_dtensor(const at::Tensor& t) { return detail::is_dtensor(t); }

namespace {

// Ends an error in backward: autograd makes zeros for a result of a user's own Function that nothing has used.
constexpr const char* kUnusedResultHint =
    ". In the backward of a torch::autograd::Function it may be the gradient of a result that nothing used: call "
    "ctx->set_materialize_grads(false) in its forward, and expect an undefined gradient";

const SpecPtr& held_spec(const at::Tensor& t) {
  if (detail::is_dtensor(t)) return detail::meta(t).spec;
  detail::refuse_deferred("a DTensor is needed", t);
  throw std::invalid_argument(
      fmt::format("a plain tensor{} was given where a DTensor is needed; make one by from_local or distribute_tensor{}",
                  t.defined() ? fmt::format(" [{}]", fmt::join(t.sizes(), ", ")) : " (undefined)",
                  in_backward() ? kUnusedResultHint : ""));
}

}  // namespace

SpecPtr spec_ptr_of(const at::Tensor& t) { return held_spec(t); }
const Spec& spec_of(const at::Tensor& t) { return *held_spec(t); }
const DeviceMesh& mesh_of(const at::Tensor& t) { return spec_of(t).mesh; }
const Placements& placements_of(const at::Tensor& t) { return spec_of(t).placements; }

std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<DeviceMesh> meshes;
  for (const at::Tensor& tensor : tensors) {
    if (is_dtensor(tensor) && std::ranges::find(meshes, mesh_of(tensor)) == meshes.end())
      meshes.push_back(mesh_of(tensor));
  }
  return meshes;
}

at::Tensor full_tensor(const at::Tensor& dtensor, const std::optional<Placements>& grad_placements) {
  const Placements replicated(placements_of(dtensor).size(), Replicate());
  return to_local(redistribute(dtensor, replicated), grad_placements);
}

std::string to_string(const at::Tensor& dtensor) {
  const Spec& spec = spec_of(dtensor);
  return fmt::format("DTensor {}, here [{}]", to_string(spec), fmt::join(spec.local_sizes, ", "));
}
std::string to_string(const DTensor& t) { return to_string(t.tensor()); }

DTensor::DTensor(at::Tensor t) : tensor_(std::move(t)) { spec_ptr_of(tensor_); }

}  // namespace tessera

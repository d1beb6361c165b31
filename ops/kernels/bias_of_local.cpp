#include "tessera/ops/kernels/bias_of_local.h"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/ops/kernels/contract_activation.h"

namespace tessera {
namespace {

// Holds the last plain result that a contract has returned on this thread on a mesh of several dimensions, and how the
// whole result is laid out.
struct LocalResult {
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> tensor;
  std::vector<int64_t> sizes;  // of the piece
  uint64_t mesh_id = 0;
  Placements layout;
};
thread_local LocalResult last_local;

// Says whether `result` is the last plain result, as it was returned, laid out as this contract says.
bool is_last_local(const at::Tensor& result, const Contract& contract, const DeviceMesh& mesh) {
  if (!last_local.tensor || last_local.tensor->lock().get() != result.unsafeGetTensorImpl()) return false;
  if (last_local.mesh_id != mesh.id() || result.sizes() != at::IntArrayRef(last_local.sizes)) return false;
  const Placements wanted =
      on_mesh_dim(last_local.layout, contract.mesh_dim, contract.output.value_or(Replicate()), result.dim());
  return wanted == last_local.layout;
}

// Returns the layout of the gradient of a bias that is added to the plain `result`, where that of the bias's own piece
// is `gradient` along the contract's mesh dimension: a sum over the ranks that hold other parts of the result. Returns
// nullopt where nobody knows how the result is laid out.
std::optional<Placements> bias_gradient(Placements gradient, const at::Tensor& result, const Contract& contract,
                                        const DeviceMesh& mesh) {
  const bool known = is_last_local(result, contract, mesh);
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    if (mesh_dim == contract.mesh_dim || mesh.size(mesh_dim) == 1) continue;
    if (!known) return std::nullopt;
    const auto d = static_cast<std::size_t>(mesh_dim);
    const Placement& placement = last_local.layout[d];
    if (placement.is_partial() || placement.is_shard(result.dim() - 1)) return std::nullopt;
    if (placement.is_shard()) gradient[d] = Partial();
  }
  return gradient;
}

}  // namespace

namespace detail {

void note_local_result(const at::Tensor& local, const at::Tensor& result) {
  if (mesh_of(result).ndim() == 1) return;
  last_local = {.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(local.getIntrusivePtr()),
                .sizes = local.sizes().vec(),
                .mesh_id = mesh_of(result).id(),
                .layout = placements_of(result)};
}

const Contract* bias_contract(const at::Tensor& self, const at::Tensor& other) {
  if (is_dtensor(self) || !is_dtensor(other)) return nullptr;
  static_assert(reads_contracts("add"));
  const Contract* const contract = contract_for(meta(other).contract, "add");
  return contract != nullptr && contract->use_local_output ? contract : nullptr;
}

at::Tensor bias_of_local(const at::Tensor& bias, const Contract& contract, const at::Tensor& result) {
  const DeviceMesh& mesh = mesh_of(bias);
  const Placement output = contract.output.value_or(Replicate());
  const bool last = output.is_shard() && (output.tensor_dim() == -1 || output.tensor_dim() == result.dim() - 1);
  const Placement cut = last ? output.on(bias.dim() - 1) : Placement(Replicate());
  const Placements layout = on_mesh_dim(placements_of(bias), contract.mesh_dim, cut, bias.dim());
  const Placements own =
      on_mesh_dim(layout, contract.mesh_dim, last ? cut : (output.is_shard() ? Partial() : Replicate()), bias.dim());
  if (!bias.requires_grad() || !at::GradMode::is_enabled()) return to_local(redistribute(bias, layout), own);
  const std::optional<Placements> gradient = bias_gradient(own, result, contract, mesh);
  if (!gradient) {
    throw std::invalid_argument(fmt::format(
        "add with {}: a plain output (use_local_output) on the mesh {}: nobody can know which part of the batch it is, "
        "and so how the bias's gradient is summed. Add the bias to the product itself, or leave use_local_output out",
        named(contract), mesh.to_string()));
  }
  return to_local(redistribute(bias, layout), gradient);
}

}  // namespace detail
}  // namespace tessera

#include "tessera/styles/layers/parallel_attributes.h"

#include <stdexcept>
#include <string>

#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

std::string text_of(const TensorParallelAttributes& a) {
  return a.is_parallel ? fmt::format("parallel along dimension {} with stride {}", a.partition_dim, a.partition_stride)
                       : "not parallel";
}

void check_alike(const at::Tensor& tensor, const TensorParallelAttributes& wanted, const char* who) {
  const TensorParallelAttributes is = tensor_parallel_attributes(tensor);
  if (is == wanted) return;
  throw std::invalid_argument(fmt::format("{}: the tensor is {}, and was to be {}; {} makes it so", who, text_of(is),
                                          text_of(wanted), is_dtensor(tensor) ? "redistribute" : "distribute_in_place"));
}

}  // namespace

TensorParallelAttributes tensor_parallel_attributes(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return {};
  const Spec& spec = spec_of(tensor);
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement& p = spec.placements[i];
    if (!p.is_shard()) continue;
    const auto dim = static_cast<std::size_t>(p.tensor_dim());
    const auto pieces = p.partition().part(spec.sizes[dim], spec.mesh.size(static_cast<int64_t>(i)), 0).size();
    return {.is_parallel = true,
            .partition_dim = p.tensor_dim(),
            .partition_stride = std::max<int64_t>(1, static_cast<int64_t>(pieces))};
  }
  return {};
}

void set_tensor_parallel_attributes(const at::Tensor& tensor, bool is_parallel, int64_t dim, int64_t stride) {
  const TensorParallelAttributes wanted{.is_parallel = is_parallel, .partition_dim = dim, .partition_stride = stride};
  check_alike(tensor, is_parallel ? wanted : TensorParallelAttributes(), "set_tensor_parallel_attributes");
}

void copy_tensor_parallel_attributes(const at::Tensor& destination, const at::Tensor& source) {
  check_alike(destination, tensor_parallel_attributes(source), "copy_tensor_parallel_attributes");
}

bool is_not_tensor_parallel_duplicate(const at::Tensor& parameter, const DeviceMesh& mesh) {
  if (!is_dtensor(parameter)) return mesh.is_member() && mesh.local_rank(0) == 0;
  const Spec& spec = spec_of(parameter);
  if (!spec.mesh.is_member()) return false;
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    const auto mesh_dim = static_cast<int64_t>(i);
    if (spec.placements[i].is_replicate() && spec.mesh.local_rank(mesh_dim) != 0) return false;
  }
  return true;
}

}  // namespace tessera

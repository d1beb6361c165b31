#include "tessera/styles/layers/parallel_attributes.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

std::string text_of(const TensorParallelAttributes& a) {
  return a.is_parallel ? fmt::format("parallel along dimension {} with stride {}", a.partition_dim, a.partition_stride)
                       : "not parallel";
}

// Of blocks it follows from their size, since on one rank they lie side by side and look like one piece.
int64_t pieces_a_rank(const Partition& partition, int64_t size, int64_t ranks) {
  const bool blocks = partition.name() == block_cyclic(1)->name();
  const int64_t pieces = blocks ? size / (ranks * std::stoll(partition.parameters()))
                                : static_cast<int64_t>(partition.part(size, ranks, 0).size());
  return std::max<int64_t>(1, pieces);
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
    return {.is_parallel = true,
            .partition_dim = p.tensor_dim(),
            .partition_stride = pieces_a_rank(p.partition(), spec.sizes[static_cast<std::size_t>(p.tensor_dim())],
                                              spec.mesh.size(static_cast<int64_t>(i)))};
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
  check_one_dimension(mesh, "is_not_tensor_parallel_duplicate");
  if (!is_dtensor(parameter)) return mesh.local_rank(0) == 0;
  const Spec& spec = spec_of(parameter);
  if (spec.partial) {
    throw std::invalid_argument(
        fmt::format("is_not_tensor_parallel_duplicate: {} is a pending reduction; redistribute it first", to_string(spec)));
  }
  if (!spec.mesh.is_member()) return false;
  for (const int64_t rank : mesh.group_ranks(0)) {
    if (rank == mesh.world().rank()) return true;
    const auto coordinate = spec.mesh.mesh().coordinate_of(rank);
    if (coordinate && local_tile(spec.sizes, spec.placements, spec.mesh.mesh().shape(), *coordinate) == spec.tile)
      return false;
  }
  return true;
}

}  // namespace tessera

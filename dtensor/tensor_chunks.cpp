#include "tessera/dtensor/tensor_chunks.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/collectives.h"
#include "tessera/placement/vocab_range.h"

namespace tessera {
namespace {

void check_mesh(const DeviceMesh& mesh, const char* who) {
  if (mesh.ndim() == 1 && mesh.is_member()) return;
  throw std::invalid_argument(fmt::format("{}: mesh {} {}", who, mesh.to_string(),
                                          mesh.is_member() ? "has several dimensions; give one of them, mesh[\"name\"]"
                                                           : "does not have this rank; call it on the mesh's ranks alone"));
}

}  // namespace

std::vector<at::Tensor> split_along_last_dim(const at::Tensor& tensor, int64_t num_partitions,
                                             bool contiguous_split_chunks) {
  if (tensor.dim() == 0) throw std::invalid_argument("split_along_last_dim: a tensor of no dimensions cannot be split");
  const int64_t size = divide(tensor.size(-1), num_partitions, "split_along_last_dim");
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < num_partitions; ++i) {
    const at::Tensor part = tensor.narrow(-1, i * size, size);
    parts.push_back(contiguous_split_chunks ? part.contiguous() : part);
  }
  return parts;
}

at::Tensor split_into_1d_equal_chunks(const at::Tensor& tensor, const DeviceMesh& mesh, bool new_buffer) {
  check_mesh(mesh, "split_into_1d_equal_chunks");
  const int64_t size = divide(tensor.numel(), mesh.size(), "split_into_1d_equal_chunks");
  const at::Tensor part = tensor.detach().reshape({-1}).narrow(0, mesh.local_rank(0) * size, size);
  return new_buffer ? part.clone() : part;
}

at::Tensor gather_split_1d_tensor(const at::Tensor& tensor, const DeviceMesh& mesh) {
  check_mesh(mesh, "gather_split_1d_tensor");
  if (tensor.dim() != 1) {
    throw std::invalid_argument(
        fmt::format("gather_split_1d_tensor: a tensor [{}]; a part is 1-D", fmt::join(tensor.sizes(), ", ")));
  }
  return all_gather(tensor.detach(), mesh, 0).view({-1});
}

}  // namespace tessera

#include "tessera/layers/tensor_chunks.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/vocab_range.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera {
namespace {

void check_plain(const at::Tensor& tensor, const char* who) {
  if (tensor.defined() && !is_dtensor(tensor)) return;
  throw std::invalid_argument(
      fmt::format("{}: the tensor is {}; give a plain one", who,
                  tensor.defined() ? "a DTensor, whose placements say what each rank has" : "undefined"));
}

}  // namespace
std::vector<at::Tensor> split_along_last_dim(const at::Tensor& tensor, int64_t num_partitions,
                                             bool contiguous_split_chunks) {
  if (tensor.dim() == 0) throw std::invalid_argument("split_along_last_dim: a tensor of no dimensions cannot be split");
  const int64_t size = divide(tensor.size(-1), num_partitions, "split_along_last_dim");
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < num_partitions; ++i) {
    const at::Tensor part = tensor.narrow(-1, i * size, size);
    parts.push_back(contiguous_split_chunks ? part.clone(at::MemoryFormat::Contiguous) : part);
  }
  return parts;
}

at::Tensor split_into_1d_equal_chunks(const at::Tensor& tensor, const DeviceMesh& mesh, bool new_buffer) {
  check_one_dimension(mesh, "split_into_1d_equal_chunks");
  check_plain(tensor, "split_into_1d_equal_chunks");
  const int64_t size = divide(tensor.numel(), mesh.size(), "split_into_1d_equal_chunks");
  const at::Tensor part = tensor.detach().reshape({-1}).narrow(0, mesh.local_rank(0) * size, size);
  return new_buffer ? part.clone() : part;
}

at::Tensor gather_split_1d_tensor(const at::Tensor& tensor, const DeviceMesh& mesh) {
  check_one_dimension(mesh, "gather_split_1d_tensor");
  check_plain(tensor, "gather_split_1d_tensor");
  if (tensor.dim() != 1) {
    throw std::invalid_argument(
        fmt::format("gather_split_1d_tensor: a tensor [{}]; a part is 1-D", fmt::join(tensor.sizes(), ", ")));
  }
  return all_gather(tensor.detach(), mesh, 0).view({-1});
}

}  // namespace tessera

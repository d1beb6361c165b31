#include "tessera/ops/kernels/joined_pieces.h"

#include <algorithm>

#include <ATen/ops/cat.h>

#include "tessera/mesh/collectives/collectives.h"

namespace tessera {

std::vector<int64_t> reduced_dims(const at::IValue& dim, int64_t ndim) {
  std::vector<int64_t> dims;
  if (dim.isInt()) dims.push_back(dim.toInt());
  if (dim.isIntList()) dims = dim.toIntVector();
  if (dims.empty()) {
    for (int64_t d = 0; d < ndim; ++d) dims.push_back(d);
  }
  for (int64_t& d : dims) d = d < 0 ? d + ndim : d;
  return dims;
}

int64_t reduced_count(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t d : dims) count *= sizes.at(static_cast<std::size_t>(d));
  return count;
}

DeviceMesh joining_mesh(const Spec& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> joining;
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement& p = spec.placements[i];
    if (p.is_shard() && std::ranges::find(dims, p.tensor_dim()) != dims.end()) {
      joining.push_back(static_cast<int64_t>(i));
    }
  }
  return spec.mesh.merged(joining);
}

at::Tensor joined(const at::Tensor& mine, const Spec& spec, const std::vector<int64_t>& dims, ReduceOp op) {
  return all_reduce(mine, joining_mesh(spec, dims), 0, op);
}

at::Tensor sum_of_parts(const at::Tensor& t, const std::vector<int64_t>& dims,
                        c10::function_ref<at::Tensor(int64_t begin, int64_t end)> sum_of_rows) {
  constexpr int64_t kPartBytes = 1 << 20;
  const int64_t rows = t.size(0);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  const int64_t step =
      t.is_cpu() && bytes > 0 ? std::max<int64_t>(1, kPartBytes * rows / bytes) : std::max<int64_t>(1, rows);
  std::vector<at::Tensor> sums;
  for (int64_t begin = 0; begin == 0 || begin < rows; begin += step) {
    sums.push_back(sum_of_rows(begin, std::min(rows, begin + step)));
  }
  if (sums.size() == 1) return sums[0];
  const at::Tensor all = at::cat(sums, 0);
  return std::ranges::find(dims, 0) != dims.end() ? all.sum(0, /*keepdim=*/true) : all;
}

}  // namespace tessera

#include "tessera/dtensor/verify_local.h"

#include <stdexcept>
#include <string_view>

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/collectives.h"

namespace tessera {
namespace {

constexpr int64_t kMaxDims = 16;  // rows are of one length, whatever a rank was given

int64_t content_hash(const at::Tensor& local) {
  const at::Tensor bytes = local.detach().contiguous().cpu();
  const std::string_view view(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  return static_cast<int64_t>(std::hash<std::string_view>{}(view));
}

// rank's row: dtype, dimensions, hash, sizes.
std::vector<int64_t> row_of(const at::Tensor& local) {
  std::vector<int64_t> row(3 + kMaxDims, 0);
  row[0] = static_cast<int64_t>(local.scalar_type());
  row[1] = local.dim();
  row[2] = content_hash(local);
  for (int64_t d = 0; d < local.dim() && d < kMaxDims; ++d) row[static_cast<std::size_t>(3 + d)] = local.size(d);
  return row;
}

// Every rank's row, in the order of the mesh's ranks.
std::vector<std::vector<int64_t>> gather_rows(const at::Tensor& local, const DeviceMesh& mesh) {
  at::Tensor rows = at::tensor(row_of(local), at::kLong).to(mesh.device()).unsqueeze(0);
  for (int64_t dim = mesh.ndim() - 1; dim >= 0; --dim) rows = all_gather(rows, mesh, dim).flatten(0, 1);
  rows = rows.cpu();
  std::vector<std::vector<int64_t>> out;
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const int64_t* begin = rows[i].const_data_ptr<int64_t>();
    out.emplace_back(begin, begin + rows.size(1));
  }
  return out;
}

std::string problem_of(const std::vector<int64_t>& row, const std::vector<int64_t>& want, at::ScalarType dtype) {
  const std::vector<int64_t> sizes(row.begin() + 3, row.begin() + 3 + row[1]);
  if (row[0] != static_cast<int64_t>(dtype)) {
    return fmt::format("has dtype {}, not {}", c10::toString(static_cast<at::ScalarType>(row[0])), c10::toString(dtype));
  }
  if (sizes != want) return fmt::format("has a piece [{}], not [{}]", fmt::join(sizes, ", "), fmt::join(want, ", "));
  return {};
}

// The position, in the mesh's ranks, of the first rank that must hold the same piece as `coordinate`.
std::size_t twin_of(std::vector<int64_t> coordinate, const Spec& spec) {
  std::size_t index = 0;
  for (std::size_t d = 0; d < coordinate.size(); ++d) {
    if (spec.placements[d].is_replicate()) coordinate[d] = 0;
    index = index * static_cast<std::size_t>(spec.mesh.mesh().shape()[d]) + static_cast<std::size_t>(coordinate[d]);
  }
  return index;
}

}  // namespace

void verify_local(const at::Tensor& local, const Spec& spec) {
  if (!spec.mesh.is_member() || spec.mesh.world().is_fake()) return;
  const Mesh& mesh = spec.mesh.mesh();
  const auto rows = gather_rows(local, spec.mesh);
  const auto dtype = static_cast<at::ScalarType>(rows[0][0]);
  std::string problems;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int64_t rank = mesh.ranks()[i];
    const auto coordinate = *mesh.coordinate_of(rank);
    const auto want = local_shape(spec.sizes, spec.placements, mesh.shape(), coordinate);
    std::string problem = problem_of(rows[i], want, dtype);
    const std::size_t twin = twin_of(coordinate, spec);
    if (problem.empty() && rows[twin][2] != rows[i][2]) {
      problem = fmt::format("differs in content from rank {}, which should hold the same piece", mesh.ranks()[twin]);
    }
    if (!problem.empty()) problems += fmt::format("; rank {} {}", rank, problem);
  }
  if (problems.empty()) return;
  throw std::invalid_argument(fmt::format("from_local: the pieces do not make one tensor [{}] as {} on {}{}",
                                          fmt::join(spec.sizes, ", "), to_string(spec.placements), spec.mesh.to_string(),
                                          problems));
}

}  // namespace tessera

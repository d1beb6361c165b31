#include "tessera/dtensor/verify_local.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {
namespace {

int64_t content_hash(const at::Tensor& local) {
  const at::Tensor bytes = in_memory(local.detach()).contiguous().cpu();
  const std::string_view view(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  return static_cast<int64_t>(std::hash<std::string_view>{}(view));
}

// Returns every rank's row, in the order of the mesh's ranks. Rows have the same length on all ranks.
std::vector<std::vector<int64_t>> gather_rows(const std::vector<int64_t>& row, const DeviceMesh& mesh) {
  at::Tensor rows = at::tensor(row, at::kLong).to(mesh.device()).unsqueeze(0);
  for (int64_t dim = mesh.ndim() - 1; dim >= 0; --dim) rows = all_gather(rows, mesh, dim).flatten(0, 1);
  rows = values_on_host(rows, mesh.world());
  std::vector<std::vector<int64_t>> out;
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const int64_t* begin = rows[i].const_data_ptr<int64_t>();
    out.emplace_back(begin, begin + rows.size(1));
  }
  return out;
}

// Describes the tensor that one rank was given.
struct Given {
  at::ScalarType dtype;
  int64_t hash;
  std::vector<int64_t> sizes;
};

// Gathers these from every rank, in the order of the mesh's ranks. Pieces may differ in their number of dimensions, so
// that is gathered first.
std::vector<Given> gather_given(const at::Tensor& local, const DeviceMesh& mesh) {
  const auto dims = gather_rows({local.dim()}, mesh);
  const auto most = static_cast<std::size_t>((*std::ranges::max_element(dims))[0]);
  std::vector<int64_t> row = {static_cast<int64_t>(local.scalar_type()), content_hash(local)};
  row.insert(row.end(), local.sizes().begin(), local.sizes().end());
  row.resize(2 + most);
  const auto rows = gather_rows(row, mesh);
  std::vector<Given> out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto sizes = rows[i].begin() + 2;
    out.push_back({static_cast<at::ScalarType>(rows[i][0]), rows[i][1], {sizes, sizes + dims[i][0]}});
  }
  return out;
}

std::string problem_of(const Given& given, const std::vector<int64_t>& want, at::ScalarType dtype) {
  if (given.dtype != dtype)
    return fmt::format("has dtype {}, not {}", c10::toString(given.dtype), c10::toString(dtype));
  if (given.sizes != want) {
    return fmt::format("has a piece [{}], not [{}]", fmt::join(given.sizes, ", "), fmt::join(want, ", "));
  }
  return {};
}

// Returns the position, in the mesh's ranks, of the first rank that must hold the same piece as `coordinate`.
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
  const std::vector<Given> given = gather_given(local, spec.mesh);
  std::string problems;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const int64_t rank = mesh.ranks()[i];
    const auto coordinate = *mesh.coordinate_of(rank);
    const auto want = local_shape(spec.sizes, spec.placements, mesh.shape(), coordinate);
    std::string problem = problem_of(given[i], want, given[0].dtype);
    const std::size_t twin = twin_of(coordinate, spec);
    if (problem.empty() && given[twin].hash != given[i].hash) {
      problem = fmt::format("differs in content from rank {}, which should hold the same piece", mesh.ranks()[twin]);
    }
    if (!problem.empty()) problems += fmt::format("; rank {} {}", rank, problem);
  }
  if (problems.empty()) return;
  throw std::invalid_argument(fmt::format("from_local: the pieces do not make one tensor [{}] as {} on {}{}",
                                          fmt::join(spec.sizes, ", "), to_string(spec.placements),
                                          spec.mesh.to_string(), problems));
}

}  // namespace tessera

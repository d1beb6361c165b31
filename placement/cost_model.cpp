#include "tessera/placement/cost_model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

CostModel uniform(int64_t mesh_ndim, const Link& link) {
  return {.links = std::vector<Link>(static_cast<std::size_t>(mesh_ndim), link)};
}

// Whether the ranks of every group along `mesh_dim` have the same rank / ranks_per_host.
bool inside_hosts(const Mesh& mesh, int64_t mesh_dim, int64_t ranks_per_host) {
  int64_t stride = 1;
  for (int64_t d = mesh_dim + 1; d < mesh.ndim(); ++d) stride *= mesh.size(d);
  const int64_t block = stride * mesh.size(mesh_dim);
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const int64_t first = i / block * block + i % stride;
    const auto host = [&](int64_t at) { return mesh.ranks()[static_cast<std::size_t>(at)] / ranks_per_host; };
    if (host(i) != host(first)) return false;
  }
  return true;
}

}  // namespace

CostModel CostModel::bytes_only(int64_t mesh_ndim) { return uniform(mesh_ndim, {}); }

CostModel CostModel::gloo(int64_t mesh_ndim) {
  return uniform(mesh_ndim, {.microseconds = 120, .bytes_per_microsecond = 2000});
}

CostModel CostModel::nvlink_infiniband(const Mesh& mesh, int64_t ranks_per_host) {
  if (ranks_per_host < 1) {
    throw std::invalid_argument(
        fmt::format("CostModel: {} ranks a host; give the number of GPUs that NVLink joins", ranks_per_host));
  }
  CostModel model;
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    model.links.push_back(inside_hosts(mesh, d, ranks_per_host) ? Link{.microseconds = 10, .bytes_per_microsecond = 200e3}
                                                                : Link{.microseconds = 20, .bytes_per_microsecond = 25e3});
  }
  return model;
}

Link CostModel::over(std::span<const int64_t> mesh_dims) const {
  Link slowest = links[static_cast<std::size_t>(mesh_dims[0])];
  for (const int64_t mesh_dim : mesh_dims) {
    const Link& link = links[static_cast<std::size_t>(mesh_dim)];
    slowest.microseconds = std::max(slowest.microseconds, link.microseconds);
    slowest.bytes_per_microsecond = std::min(slowest.bytes_per_microsecond, link.bytes_per_microsecond);
  }
  return slowest;
}

double CostModel::microseconds(std::span<const int64_t> mesh_dims, double bytes) const {
  const Link link = over(mesh_dims);
  return link.microseconds + bytes / link.bytes_per_microsecond;
}

std::string CostModel::to_string() const {
  std::string out;
  for (const Link& link : links) {
    out += fmt::format("{}{} us + {} MB/s", out.empty() ? "" : ", ", link.microseconds, link.bytes_per_microsecond);
  }
  return out;
}

void check_cost_model(const CostModel& model, int64_t mesh_ndim, const std::string& who) {
  const auto bad = [](const Link& link) {
    return !(link.microseconds >= 0) || !(link.bytes_per_microsecond > 0) || !std::isfinite(link.microseconds);
  };
  if (static_cast<int64_t>(model.links.size()) == mesh_ndim && std::none_of(model.links.begin(), model.links.end(), bad))
    return;
  throw std::invalid_argument(
      fmt::format("{}: the cost model [{}] does not fit a mesh of {} dimensions; give each a latency of at least 0 and a "
                  "bandwidth above 0",
                  who, model.to_string(), mesh_ndim));
}

}  // namespace tessera

#include "tessera/dtensor/measured_costs.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "tessera/mesh/collectives.h"

namespace tessera {
namespace {

constexpr std::array<int64_t, 4> kBytes = {1 << 10, 64 << 10, 1 << 20, 4 << 20};  // that a rank gives and gets
constexpr int kWarmUps = 3;
constexpr int kRepeats = 9;

void wait_for_device(const DeviceMesh& mesh) {
  const c10::Device device = mesh.device();
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

double median(std::vector<double> times) {
  const auto middle = times.begin() + std::ssize(times) / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// Microseconds of one all-to-all in which every rank gives `bytes` to the others together.
double time_of(int64_t bytes, const DeviceMesh& mesh, int64_t mesh_dim) {
  const int64_t n = mesh.size(mesh_dim);
  std::vector<int64_t> counts(static_cast<std::size_t>(n), bytes / (n - 1));
  counts[static_cast<std::size_t>(mesh.local_rank(mesh_dim))] = 0;
  const at::Tensor input = at::zeros({std::accumulate(counts.begin(), counts.end(), int64_t{0})},
                                     at::TensorOptions(at::kByte).device(mesh.device()));
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + kRepeats; ++i) {
    barrier(mesh, mesh_dim);
    const auto start = std::chrono::steady_clock::now();
    all_to_all(input, counts, counts, mesh, mesh_dim);
    wait_for_device(mesh);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    if (i >= kWarmUps) times.push_back(time.count());
  }
  return median(std::move(times));
}

}  // namespace

CostModel measured_costs(const DeviceMesh& mesh) {
  if (!mesh.is_member() || mesh.world().is_fake()) {
    throw std::invalid_argument(
        fmt::format("measured_costs: {}; call it on every rank of a mesh that communicates, or give CostModel's own figures",
                    mesh.is_member() ? "nothing travels in a fake world"
                                     : fmt::format("rank {} is outside mesh {}", mesh.world().rank(), mesh.to_string())));
  }
  std::vector<LinkSample> samples;
  std::vector<double> times;
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    if (mesh.size(d) == 1) continue;
    for (const int64_t bytes : kBytes) {
      const int64_t travels = bytes / (mesh.size(d) - 1) * (mesh.size(d) - 1);
      times.push_back(time_of(bytes, mesh, d));
      samples.push_back({.mesh_dim = d, .bytes = static_cast<double>(travels), .microseconds = 0});
    }
  }
  // What is fitted must be the same everywhere.
  at::Tensor slowest = at::tensor(times, at::kDouble).to(mesh.device());
  for (int64_t d = 0; d < mesh.ndim(); ++d) slowest = all_reduce(slowest, mesh, d, ReduceOp::kMax);
  slowest = slowest.cpu();
  for (std::size_t i = 0; i < samples.size(); ++i) samples[i].microseconds = slowest.data_ptr<double>()[i];
  return CostModel::fitted(mesh.mesh(), samples);
}

}  // namespace tessera

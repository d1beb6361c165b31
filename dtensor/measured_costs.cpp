#include "tessera/dtensor/measured_costs.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <ATen/ops/amin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {
namespace {

// Lists how many bytes a rank sends and receives in one measurement.
constexpr std::array<int64_t, 4> kBytes = {1 << 10, 64 << 10, 1 << 20, 4 << 20};
constexpr int kWarmUps = 3;
constexpr int kRepeats = 9;
constexpr int kRounds = 8;

void wait_for_device(const DeviceMesh& mesh) {
  const c10::Device device = mesh.device();
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Runs an all-to-all along a mesh dimension in which every rank sends about `bytes` to the others in total.
struct Exchange {
  Exchange(int64_t bytes, const DeviceMesh& mesh, int64_t mesh_dim)
      : mesh_dim(mesh_dim), counts(static_cast<std::size_t>(mesh.size(mesh_dim)), bytes / (mesh.size(mesh_dim) - 1)) {
    counts[static_cast<std::size_t>(mesh.local_rank(mesh_dim))] = 0;
    travels = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    input = at::zeros({travels}, at::TensorOptions(at::kByte).device(mesh.device()));
  }

  // Returns the microseconds on this rank.
  double time(const DeviceMesh& mesh) const {
    barrier(mesh, mesh_dim);
    const auto start = std::chrono::steady_clock::now();
    all_to_all(input, counts, counts, mesh, mesh_dim);
    wait_for_device(mesh);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  }

  int64_t mesh_dim;
  std::vector<int64_t> counts;
  int64_t travels = 0;
  at::Tensor input;
};

// Returns for each exchange the slowest rank's microseconds, and of several repeats the least, since other load on a
// machine only adds time. The exchanges take turns, so that a slow phase of the machine affects all of them.
std::vector<double> times_of(const std::vector<Exchange>& exchanges, const DeviceMesh& mesh) {
  std::vector<std::vector<double>> times;
  for (int i = 0; i < kRepeats; ++i) {
    std::vector<double>& now = times.emplace_back();
    for (const Exchange& exchange : exchanges) now.push_back(exchange.time(mesh));
  }
  at::Tensor slowest = at::empty({kRepeats, std::ssize(exchanges)}, at::kDouble);
  for (int i = 0; i < kRepeats; ++i)
    std::ranges::copy(times[static_cast<std::size_t>(i)], slowest[i].data_ptr<double>());
  slowest = slowest.to(mesh.device());
  for (int64_t d = 0; d < mesh.ndim(); ++d) slowest = all_reduce(slowest, mesh, d, ReduceOp::kMax);
  const at::Tensor least = values_on_host(slowest, mesh.world()).amin(0);
  return {least.data_ptr<double>(), least.data_ptr<double>() + least.numel()};
}

// Says whether the largest size takes the longest along every mesh dimension; without that no link can be fitted. The
// samples of a mesh dimension are adjacent, in the order of kBytes.
bool grow(const std::vector<LinkSample>& samples) {
  for (auto most = samples.begin() + (kBytes.size() - 1);; most += kBytes.size()) {
    const auto is_less = [&](const LinkSample& sample) { return sample.microseconds < most->microseconds; };
    if (!std::all_of(most - (kBytes.size() - 1), most, is_less)) return false;
    if (samples.end() - most == 1) return true;
  }
}

}  // namespace

CostModel measured_costs(const DeviceMesh& mesh) {
  if (!mesh.is_member() || mesh.world().is_fake()) {
    throw std::invalid_argument(fmt::format(
        "measured_costs: {}; call it on every rank of a mesh that communicates, or give CostModel's own figures",
        mesh.is_member() ? "a fake world sends nothing"
                         : fmt::format("rank {} is outside mesh {}", mesh.world().rank(), mesh.to_string())));
  }
  const detail::NotDeferred own_tensors;
  std::vector<Exchange> exchanges;
  std::vector<LinkSample> samples;
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    if (mesh.size(d) == 1) continue;
    for (const int64_t bytes : kBytes) {
      const Exchange& exchange = exchanges.emplace_back(bytes, mesh, d);
      samples.push_back({.mesh_dim = d,
                         .bytes = static_cast<double>(exchange.travels),
                         .microseconds = std::numeric_limits<double>::infinity()});
    }
  }
  if (exchanges.empty()) return CostModel::fitted(mesh.mesh(), samples);
  for (int i = 0; i < kWarmUps; ++i) {
    for (const Exchange& exchange : exchanges) exchange.time(mesh);
  }
  // Times are the same on every rank after the all-reduce, so all ranks stop in the same round.
  for (int round = 0; round == 0 || (round < kRounds && !grow(samples)); ++round) {
    const std::vector<double> times = times_of(exchanges, mesh);
    for (std::size_t i = 0; i < samples.size(); ++i)
      samples[i].microseconds = std::min(samples[i].microseconds, times[i]);
  }
  return CostModel::fitted(mesh.mesh(), samples);
}

}  // namespace tessera
